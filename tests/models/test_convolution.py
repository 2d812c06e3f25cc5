"""Our convolution and pooling against those of XLA, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.models import convolution as convolution_lib
from sfjax.models.convolution import convolution, max_pool


def xla_convolution(x: jax.Array, kernel: jax.Array, *, stride: int, padding='VALID') -> jax.Array:
  return jax.lax.conv_general_dilated(
    x.astype(kernel.dtype),
    kernel,
    (stride, stride),
    padding,
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


def xla_max_pool(x: jax.Array) -> jax.Array:
  around = ((0, 0), (1, 1), (1, 1), (0, 0))
  return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)


def check_equal(ours, theirs, *arrays):
  """Compares outputs, and the gradients of a random weighted sum of them."""
  shape = jax.eval_shape(theirs, *arrays).shape
  weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)

  @jax.jit
  def both(*arrays):
    def gradients(function):
      def total(*arrays):
        out = function(*arrays)
        return jnp.sum(out * weights), out

      return jax.grad(total, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)

    return gradients(ours), gradients(theirs)

  one, other = both(*arrays)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, other)


def random_arrays(n, height, width, channels, size, features):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(n, height, width, channels)).astype(np.float32)
  kernel = rng.normal(size=(size, size, channels, features)).astype(np.float32) / size
  return x, kernel


SHAPES = [
  (1, 8, 8, 3, 8, 4, 5),  # One position.
  (2, 72, 128, 3, 8, 4, 4),  # The first layer on Doom, image by image.
  (3, 17, 31, 5, 4, 2, 6),  # The second layer: rows and columns are left over.
  (2, 7, 14, 4, 3, 2, 6),  # The third: the kernel is no multiple of the stride.
  (2, 11, 10, 2, 4, 4, 3),  # Windows side by side, some pixels outside all of them.
  (2, 9, 10, 1, 2, 3, 2),  # Pixels between the windows belong to none.
  (2, 6, 5, 2, 3, 1, 2),
  (2, 13, 14, 2, 5, 3, 2),
  (2, 12, 9, 3, 6, 2, 2),
  (1, 30, 31, 1, 1, 1, 2),
]


@pytest.mark.parametrize('n, height, width, channels, size, stride, features', SHAPES)
def test_convolution_and_its_gradients_equal_those_of_xla(
  n, height, width, channels, size, stride, features
):
  """Catches patches in another order than the kernel, a lost row or column, a wrong transpose."""
  check_equal(
    lambda x, kernel: convolution(x, kernel, stride=stride),
    lambda x, kernel: xla_convolution(x, kernel, stride=stride),
    *random_arrays(n, height, width, channels, size, features),
  )


@pytest.mark.parametrize('size, height, width', ((3, 9, 12), (3, 2, 1), (5, 4, 7)))
def test_padding_keeps_the_size_as_that_of_xla_does(size, height, width):
  """Catches padding on one side, or by the kernel instead of its reach."""
  check_equal(
    lambda x, kernel: convolution(x, kernel, padding=(size - 1) // 2),
    lambda x, kernel: xla_convolution(x, kernel, stride=1, padding='SAME'),
    *random_arrays(2, height, width, 3, size, 4),
  )


def test_both_weight_gradients_are_one():
  """Catches a slip in only one of the two ways, which are chosen by the size of the image."""
  limit = convolution_lib._MIN_POSITIONS
  for side in (4, 12):
    assert (side * side >= limit) == (side == 12)
    check_equal(
      convolution,
      lambda x, kernel: xla_convolution(x, kernel, stride=1),
      *random_arrays(3, side + 2, side + 2, 2, 3, 4),
    )


@pytest.mark.parametrize('height, width', ((8, 8), (7, 10), (2, 1), (36, 5)))
def test_pooling_and_its_gradient_equal_those_of_xla(height, width):
  """Catches windows that start inside, zeros as padding, and a lost last row.

  All numbers are below 0, so that padding of 0 would win, and different, as XLA gives the gradient
  of equal ones to one of them.
  """
  rng = np.random.default_rng(0)
  x = -1.0 - rng.permutation(2 * height * width * 3).reshape(2, height, width, 3) / 7
  check_equal(max_pool, xla_max_pool, x.astype(np.float32))


def test_equal_pixels_share_the_gradient():
  """Catches a gradient that is counted for each of them, or lost."""
  gradient = jax.jit(jax.grad(lambda x: jnp.sum(max_pool(x))))(np.zeros((1, 6, 4, 2), np.float32))
  # 3 × 2 windows in 2 channels, each passes on 1.
  np.testing.assert_allclose(jnp.sum(gradient), 12.0, rtol=1e-6)
  assert np.all(gradient >= 0)


def test_bytes_are_convolved_in_the_dtype_of_the_kernel():
  """Catches products of bytes, which wrap, and numbers that widen a bfloat16 kernel."""
  x, kernel = random_arrays(2, 6, 5, 3, 3, 4)
  pixels = np.random.default_rng(0).integers(0, 256, x.shape).astype(np.uint8)

  @jax.jit
  def both(x, kernel):
    ours = convolution(x, kernel, padding=1)
    return ours, xla_convolution(x, kernel, stride=1, padding='SAME')

  np.testing.assert_allclose(*both(pixels, kernel), rtol=1e-4, atol=1e-2)
  low = jax.ShapeDtypeStruct(kernel.shape, jnp.bfloat16)
  for inputs in (pixels, x):
    assert jax.eval_shape(convolution, inputs, low).dtype == jnp.bfloat16
  gradients = jax.eval_shape(
    jax.grad(lambda x, kernel: jnp.sum(convolution(x, kernel)), argnums=(0, 1)), x, low
  )
  assert [gradient.dtype for gradient in gradients] == [jnp.float32, jnp.bfloat16]
