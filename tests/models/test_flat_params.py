"""Parameters as bytes: nothing is lost, moved or taken in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.models.flat_params import flat_nbytes, flatten_params, unflatten_params


def make_params():
  """Every kind of leaf: odd sizes, scalars, nothing, a transposed array, other dtypes."""
  rng = np.random.default_rng(0)
  return {
    'params': {
      'kernel': rng.normal(size=(3, 7)).astype(np.float32),
      'transposed': rng.normal(size=(5, 6)).astype(np.float32).T,
      'half': rng.normal(size=(9,)).astype(np.float16),
      'empty': np.zeros((0, 4), np.float32),
    },
    'count': np.int32(-7),
    'on_device': jnp.asarray(rng.normal(size=(2, 1, 17)), jnp.float32),
    'short': jnp.asarray(rng.normal(size=(33,)), jnp.bfloat16),
    'mask': np.array([True, False, True]),
    'extremes': np.array([np.nan, np.inf, -0.0, 1e-45], np.float32),
  }


def assert_same_bits(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize('only_shapes', (False, True))
def test_params_come_back_bit_for_bit(only_shapes):
  """Catches a wrong order of leaves or elements, a lost sign or NaN, and a cast."""
  params = make_params()
  template = jax.eval_shape(lambda: params) if only_shapes else params
  flat = flatten_params(params)
  assert (flat.dtype, flat.shape) == (np.uint8, (flat_nbytes(template),))
  assert_same_bits(unflatten_params(flat, template), params)


def test_leaves_do_not_overlap_and_start_at_64_bytes():
  """Catches spans that are too short, and starts that make XLA copy."""
  params = make_params()
  flat = np.zeros(flat_nbytes(params), np.uint8)
  leaves = jax.tree.leaves(unflatten_params(flat, params))
  for leaf in leaves:
    assert (leaf.ctypes.data - flat.ctypes.data) % 64 == 0 or not leaf.size
    leaf.reshape(-1).view(np.uint8)[...] += 1
  assert flat.max() == 1
  assert flat.sum() == sum(leaf.nbytes for leaf in leaves)


def test_flat_params_are_a_copy():
  """Catches bytes that change when the parameters are trained on."""
  params = make_params()
  flat = flatten_params(params)
  before = flat.copy()
  params['params']['kernel'] += 1
  np.testing.assert_array_equal(flat, before)
