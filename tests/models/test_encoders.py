"""Encoders: our convolution against XLA's, and what becomes of bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.models import encoders
from sfjax.models.actor_critic import make_model
from sfjax.models.encoders import ConvEncoder, MlpEncoder, convolution
from sfjax.specs import EnvSpec, array_spec


def xla_convolution(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
  return jax.lax.conv_general_dilated(
    x.astype(kernel.dtype),
    kernel,
    (stride, stride),
    'VALID',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


def check_against_xla(n, height, width, channels, size, stride, features):
  """Compares the output and the gradients of a random weighted sum of it."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(n, height, width, channels)).astype(np.float32)
  kernel = rng.normal(size=(size, size, channels, features)).astype(np.float32) / size
  positions = [(side - size) // stride + 1 for side in (height, width)]
  weights = rng.normal(size=(n, *positions, features)).astype(np.float32)

  @jax.jit
  def both(x, kernel):
    def gradients(convolve):
      def total(x, kernel):
        out = convolve(x, kernel, stride)
        return jnp.sum(out * weights), out

      return jax.grad(total, argnums=(0, 1), has_aux=True)(x, kernel)

    return gradients(convolution), gradients(xla_convolution)

  ours, theirs = both(x, kernel)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


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


@pytest.mark.parametrize('shape', SHAPES)
def test_convolution_and_its_gradients_equal_those_of_xla(shape):
  """Catches patches in another order than the kernel, a lost row or column, a wrong transpose."""
  check_against_xla(*shape)


def test_both_weight_gradients_are_one():
  """Catches a slip in only one of the two ways, which are chosen by the size of the image."""
  limit = encoders._MIN_POSITIONS
  for side in (4, 12):
    assert (side * side >= limit) == (side == 12)
    check_against_xla(3, side + 2, side + 2, 2, 3, 1, 4)


@pytest.fixture(scope='module')
def doom():
  return encoder_and_pixels(72, 128)


def encoder_and_pixels(height, width):
  """An encoder with large random parameters, jitted, these, and a few images."""
  encoder = ConvEncoder(size=32)
  rng = np.random.default_rng(0)
  obs = rng.integers(0, 256, (3, height, width, 3)).astype(np.uint8)
  shapes: Any = jax.eval_shape(encoder.init, jax.random.key(0), obs)
  params = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / np.sqrt(leaf.size // 32), shapes
  )
  return jax.jit(encoder.apply), params, obs


def test_the_encoder_of_doom_has_the_layers_it_says(doom):
  """Catches another kernel, stride or width, or padding."""
  encode, params, obs = doom
  shapes = {name: value.shape for name, value in params['params'].items() if name != 'Dense_0'}
  assert shapes == {
    'conv_0': (8, 8, 3, 32),
    'conv_0_bias': (32,),
    'conv_1': (4, 4, 32, 64),
    'conv_1_bias': (64,),
    'conv_2': (3, 3, 64, 128),
    'conv_2_bias': (128,),
  }
  # 72 × 128 → 17 × 31 → 7 × 14 → 3 × 6, of 128 channels: 2304 into the dense layer.
  assert params['params']['Dense_0']['kernel'].shape == (2304, 32)
  # 8·8·3·32 + 32 = 6,176; 4·4·32·64 + 64 = 32,832; 3·3·64·128 + 128 = 73,856;
  # 2304·32 + 32 = 73,760.
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 6_176 + 32_832 + 73_856 + 73_760
  assert encode(params, obs).shape == (3, 32)


def test_bytes_are_read_as_0_to_1(doom):
  """Catches a scale that is missing, applied twice, or applied to numbers that are no bytes."""
  encode, params, obs = doom
  pixels = obs.astype(np.float32) / 255
  np.testing.assert_allclose(encode(params, obs), encode(params, pixels), rtol=1e-4, atol=1e-4)
  dark, low = np.zeros_like(obs), np.ones(obs.shape, np.float32) / 255
  np.testing.assert_allclose(encode(params, dark + 1), encode(params, low), rtol=1e-4, atol=1e-4)
  assert np.abs(encode(params, dark) - encode(params, obs)).max() > 0.1


def test_gradients_of_bytes_are_those_of_the_numbers_they_stand_for():
  """Catches a gradient that is not scaled as the output is."""
  encode, params, obs = encoder_and_pixels(36, 36)

  @jax.jit
  def gradients(params, obs):
    return jax.grad(lambda params: jnp.sum(jnp.square(encode(params, obs))))(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max()),
    gradients(params, obs),
    gradients(params, obs.astype(np.float32) / 255),
  )


def test_observations_do_not_see_each_other(doom):
  """Catches patches that mix images."""
  encode, params, obs = doom
  mixed = np.stack([obs[1], obs[1], obs[0]])
  one, other = encode(params, obs), encode(params, mixed)
  np.testing.assert_allclose(other[2], one[0], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(other[:2], np.stack([one[1]] * 2), rtol=1e-5, atol=1e-5)


def test_the_mlp_is_tanh_of_its_layers():
  """Catches a missing nonlinearity and a layer too few."""
  encoder = MlpEncoder(layers=(5, 3))
  obs = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
  params: Any = encoder.init(jax.random.key(0), obs)
  hidden = obs
  for layer in ('Dense_0', 'Dense_1'):
    dense = params['params'][layer]
    hidden = np.tanh(hidden @ dense['kernel'] + dense['bias'][None])
  features: Any = encoder.apply(params, obs)
  np.testing.assert_allclose(features, hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('shape, encoder', (((4,), 'conv'), ((72, 128, 3), 'mlp')))
def test_a_network_of_the_wrong_encoder_is_refused(shape, encoder):
  """Catches an error from deep inside the network."""
  config = config_lib.Config()
  config.model.encoder = config_lib.Encoder(encoder)
  with pytest.raises(ValueError, match=f'model.encoder is {encoder}'):
    make_model(config, EnvSpec({'obs': array_spec(np.uint8, *shape)}, 2))
