"""The clipped value loss, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.losses import clipped_value_loss


@jax.jit
@jax.value_and_grad
def value_and_grad(v, behaviour_v, targets):
  return clipped_value_loss(v, behaviour_v, targets, clip=0.5)[0]


@pytest.mark.parametrize(
  ('value', 'behaviour', 'target', 'loss', 'slope'),
  [
    # clip = 1/2; slope is d loss / d value.
    (1.2, 1.0, 3.0, 3.24, -3.6),  # Moved by 0.2: plain (1.2 - 3)², no factor 1/2.
    (2.0, 1.0, 3.0, 2.25, 0.0),  # Moved 1 towards the target: pays as 1.5, (1.5 - 3)².
    (0.0, 1.0, 3.0, 9.0, -6.0),  # Moved away: the plain square is larger and pulls back.
    (0.0, 1.0, -1.0, 2.25, 0.0),  # The same downwards: (0.5 + 1)².
  ],
)
def test_the_larger_square_is_kept(value, behaviour, target, loss, slope):
  """Catches min for max, a factor 1/2, and clipping around the target."""
  result, grad = value_and_grad(*jnp.array([[value], [behaviour], [target]]))
  np.testing.assert_allclose(result, loss, rtol=1e-5)
  np.testing.assert_allclose(grad, [slope], rtol=1e-5, atol=1e-6)


def test_only_the_critic_has_a_gradient():
  """Catches targets or stored values that learn."""

  def total(behaviour, targets):
    return jnp.sum(clipped_value_loss(jnp.array([0.0, 2.0]), behaviour, targets))

  for grad in jax.grad(total, (0, 1))(jnp.array([1.0, 1.0]), jnp.array([3.0, -3.0])):
    np.testing.assert_array_equal(grad, 0.0)


def test_per_step_loss_with_a_traced_clip():
  """Catches a mean inside, a clip that must be a Python constant, and broadcasting."""
  loss = jax.jit(clipped_value_loss)(*jnp.ones((3, 4, 2, 2)), clip=jnp.array(0.1))
  assert loss.shape == (4, 2, 2)
  with pytest.raises(AssertionError):
    clipped_value_loss(jnp.zeros(3), jnp.zeros(3), jnp.zeros((3, 1)))
