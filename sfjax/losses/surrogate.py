"""Policy losses of one step: the clipped surrogate of PPO and the plain policy gradient."""

import chex
import jax
import jax.numpy as jnp


def clipped_surrogate_loss(
  log_ratio_tm1: jax.Array,
  advantages_tm1: jax.Array,
  *,
  ratio_min: float | jax.Array = 1 / 1.1,
  ratio_max: float | jax.Array = 1.1,
) -> jax.Array:
  """Computes the clipped surrogate loss of every step, unreduced.

  Implements eq. 7 of "Proximal Policy Optimization Algorithms" (Schulman et al.
  2017, arXiv:1707.06347), negated so that it is minimised.

  Differs from the paper: the range is given by its two ends, because [1 - ε, 1 + ε]
  lets a probability rise by less than it may fall. "Sample Factory" (Petrenko et al.
  2020, arXiv:2006.11751) keeps the ratio in [1 / (1 + c), 1 + c], symmetric in log space.

  Args:
    log_ratio_tm1: [T, ...] log π(a|x) - log μ(a|x); the gradient flows through it.
    advantages_tm1: [T, ...] advantage of the action, *not* weighted by a ratio: the
      surrogate's ratio already is the importance weight. No gradient flows through it.
    ratio_min: below this ratio a negative advantage no longer pushes.
    ratio_max: above this ratio a positive advantage no longer pushes.

  Returns:
    [T, ...] loss of each step, to be averaged over valid samples by the caller.
  """
  chex.assert_equal_shape([log_ratio_tm1, advantages_tm1])
  advantages = jax.lax.stop_gradient(advantages_tm1)
  ratio = jnp.exp(log_ratio_tm1)
  clipped = jnp.clip(ratio, ratio_min, ratio_max)
  return -jnp.minimum(ratio * advantages, clipped * advantages)


def policy_gradient_loss(log_prob_tm1: jax.Array, weighted_advantages_tm1: jax.Array) -> jax.Array:
  """Computes the plain policy gradient loss of every step, unreduced.

  The actor's update of "IMPALA" (Espeholt et al. 2018, arXiv:1802.01561, section 4.2)
  when the advantage is weighted by min(rho_bar, π/μ), and that of A2C ("Asynchronous
  Methods for Deep Reinforcement Learning", Mnih et al. 2016, arXiv:1602.01783,
  section 4) when it is not.

  Args:
    log_prob_tm1: [T, ...] log π(a|x) of the action; the gradient flows through it.
    weighted_advantages_tm1: [T, ...] advantage times importance weight. No gradient
      flows through it.

  Returns:
    [T, ...] loss of each step, to be averaged over valid samples by the caller.
  """
  chex.assert_equal_shape([log_prob_tm1, weighted_advantages_tm1])
  return -log_prob_tm1 * jax.lax.stop_gradient(weighted_advantages_tm1)
