"""The exploration losses: their sign and their bound."""

import jax
import jax.numpy as jnp
import numpy as np

from sfjax.losses import entropy_loss, symmetric_kl_loss


def test_descending_raises_the_entropy():
  """Catches a lost sign, and a mean inside, which could not be masked."""
  entropy = jnp.array([[0.5, 2.0], [0.0, 1.0]])
  np.testing.assert_array_equal(entropy_loss(entropy), -entropy)


def test_descending_lowers_the_divergence_up_to_the_cap():
  """Catches the entropy's sign, and a cap on the mean: one collapsed step would end it for all."""
  value, grad = jax.value_and_grad(lambda x: jnp.sum(symmetric_kl_loss(x)))(
    jnp.array([[0.5, 29.0], [1e6, np.inf]])
  )
  assert value == 0.5 + 29 + 30 + 30
  np.testing.assert_array_equal(grad, [[1, 1], [0, 0]])
  np.testing.assert_array_equal(symmetric_kl_loss(jnp.array([-3.0, 3.0]), cap=2.0), [-3, 2])
