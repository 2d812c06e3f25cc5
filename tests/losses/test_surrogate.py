"""The clipped surrogate and the plain policy gradient, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.losses import clipped_surrogate_loss, policy_gradient_loss


@jax.jit
@jax.value_and_grad
def value_and_grad(log_ratio, advantages):
  return clipped_surrogate_loss(log_ratio, advantages, ratio_min=0.5, ratio_max=1.5)[0]


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'loss', 'slope'),
  [
    # Range [1/2, 3/2]. The slope is d loss / d log ratio = -ratio · advantage, or 0 if clipped.
    (1.2, 2.0, -2.4, -2.4),  # Inside: the plain product.
    (2.0, 2.0, -3.0, 0.0),  # Good and already likelier: clipped at 3/2 · 2, no more push.
    (0.25, 2.0, -0.5, -0.5),  # Good but less likely: must be pulled back, not clipped.
    (0.25, -2.0, 1.0, 0.0),  # Bad and already less likely: clipped at 1/2 · -2.
    (2.0, -2.0, 4.0, 4.0),  # Bad but likelier: the pessimistic side, not clipped.
  ],
)
def test_the_pessimistic_side_is_kept(ratio, advantage, loss, slope):
  """Catches max for min, a lost sign, and clipping on the side that must be pulled back."""
  value, grad = value_and_grad(np.log([ratio], dtype=np.float32), jnp.array([advantage]))
  np.testing.assert_allclose(value, loss, rtol=1e-5)
  np.testing.assert_allclose(grad, [slope], rtol=1e-5)


def test_the_default_range_is_symmetric_in_log_space():
  """Catches 1 - c as the lower end: at ratio 0.9 the surrogate would stop too late."""
  log_ratio = np.log([0.9, 0.92, 1 / 0.9, 1 / 0.92], dtype=np.float32)

  def total(log_ratio):
    return jnp.sum(clipped_surrogate_loss(log_ratio, jnp.array([-1.0, -1.0, 1.0, 1.0])))

  # 1 / 1.1 = 0.909: 0.9 and 1 / 0.9 are outside, 0.92 and 1 / 0.92 inside.
  np.testing.assert_array_equal(
    jax.jit(jax.grad(total))(log_ratio) == 0, [True, False, True, False]
  )


@pytest.mark.parametrize('ends', [(1 / 1.2, 1.2), (0.8, 1.2)])
def test_only_what_left_the_range_is_not_pushed_farther(ends):
  """Catches an end of the other style, at ratios a thousandth inside and outside of each end."""
  low, high = ends
  ratio = np.array([low - 1e-3, low + 1e-3, high - 1e-3, high + 1e-3], np.float32)

  def total(log_ratio):
    losses = clipped_surrogate_loss(
      log_ratio, jnp.array([-1.0, -1.0, 1.0, 1.0]), ratio_min=low, ratio_max=high
    )
    return jnp.sum(losses)

  np.testing.assert_array_equal(
    jax.jit(jax.grad(total))(np.log(ratio)) == 0, [True, False, False, True]
  )


def test_a_reduced_loss_cannot_be_masked():
  """Catches a mean inside, and a range that must be a Python constant."""
  ends = {'ratio_min': jnp.array(0.5), 'ratio_max': jnp.array(2.0)}
  loss = jax.jit(clipped_surrogate_loss)(jnp.zeros((3, 2, 2)), jnp.ones((3, 2, 2)), **ends)
  assert loss.shape == (3, 2, 2)
  assert policy_gradient_loss(jnp.zeros((3, 2)), jnp.ones((3, 2))).shape == (3, 2)


def test_policy_gradient_climbs_the_advantage():
  """Catches a lost sign: the slope in log π is minus the weighted advantage."""
  weighted = jnp.array([2.0, -3.0])
  grad = jax.grad(lambda x: jnp.sum(policy_gradient_loss(x, weighted)))(jnp.array([-1.0, -2.0]))
  np.testing.assert_array_equal(grad, [-2.0, 3.0])


@pytest.mark.parametrize('loss', [clipped_surrogate_loss, policy_gradient_loss])
def test_no_gradient_through_the_advantage(loss):
  """Catches a critic that learns to flatter the actor."""
  grad = jax.grad(lambda x: jnp.sum(loss(jnp.array([0.1, -0.1]), x)))(jnp.array([1.0, -1.0]))
  np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize('loss', [clipped_surrogate_loss, policy_gradient_loss])
def test_a_missing_axis_is_not_broadcast(loss):
  """Catches [T, 1] against [T]."""
  with pytest.raises(AssertionError):
    loss(jnp.zeros(3), jnp.zeros((3, 1)))
