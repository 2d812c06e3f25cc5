"""The entropy loss of a categorical policy."""

import jax
import jax.numpy as jnp
import numpy as np

from sfjax.losses import entropy_loss

loss_of = jax.jit(entropy_loss)
value_and_grad = jax.jit(jax.value_and_grad(lambda logits: jnp.sum(entropy_loss(logits))))


def test_entropy_in_nats_negated():
  """Catches a lost sign, base 2, and unnormalised logits taken for log-probabilities."""
  # Uniform over 4: log 4. Logits log 3 and 0: p = 3/4, 1/4, so 3/4 log 4/3 + 1/4 log 4.
  np.testing.assert_allclose(loss_of(jnp.full((2, 4), 7.0)), [-np.log(4)] * 2, rtol=1e-6)
  expected = -(0.75 * np.log(4 / 3) + 0.25 * np.log(4))
  np.testing.assert_allclose(loss_of(jnp.log(jnp.array([[3.0, 1.0]]))), [expected], rtol=1e-6)


def test_descending_makes_the_policy_more_random():
  """Catches the sign of the gradient: the likelier action must lose."""
  _, grad = value_and_grad(jnp.array([[1.0, 0.0]]))
  assert grad[0, 0] > 0 > grad[0, 1]


def test_a_masked_action_makes_no_nan():
  """Catches 0 · log 0, in the value and in the gradient."""
  logits = jnp.array([[0.0, 0.0, -jnp.inf], [0.0, 0.0, -1e30]])
  loss, grad = value_and_grad(logits)
  np.testing.assert_allclose(loss, -2 * np.log(2), rtol=1e-6)
  np.testing.assert_allclose(grad, np.zeros((2, 3)), atol=1e-7)


def test_a_reduced_loss_cannot_be_masked():
  """Catches a sum over more than the actions."""
  assert loss_of(jnp.zeros((5, 3, 2, 4))).shape == (5, 3, 2)
