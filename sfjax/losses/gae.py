"""Generalized advantage estimates, for trajectories that are (nearly) on-policy."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class GAEOutput(NamedTuple):
  targets: jax.Array  # [T, ...] critic regression targets, the λ-returns V + advantage.
  advantages: jax.Array  # [T, ...] exponentially weighted sums of TD errors, for the actor.


def gae(
  v_tm1: jax.Array,
  v_t: jax.Array,
  r_t: jax.Array,
  discount_t: jax.Array,
  done_t: jax.Array,
  *,
  lambda_: float | jax.Array = 0.95,
) -> GAEOutput:
  """Computes generalized advantage estimates; time is axis 0, other axes are free.

  Implements eq. 16 of "High-Dimensional Continuous Control Using Generalized
  Advantage Estimation" (Schulman et al. 2015, arXiv:1506.02438), cut off at the
  trajectory's end as in eq. 11 of "Proximal Policy Optimization Algorithms"
  (Schulman et al. 2017, arXiv:1707.06347), with a sum that stops at every episode
  end. Inputs must be finite everywhere; the caller makes unplayed slots neutral.

  Args:
    v_tm1: [T, ...] value of the observation acted on.
    v_t: [T, ...] value of the observation that followed, *before* any reset: at
      an episode end this is the final observation, not the next episode's first.
    r_t: [T, ...] reward received for the action.
    discount_t: [T, ...] γ, or 0 where the episode terminated (not truncated).
    done_t: [T, ...] true where the episode ended for any reason.
    lambda_: trades the bias of one-step errors (0) against the variance of full
      returns (1).

  Returns:
    Targets for the critic and advantages for the actor, both behind a
    stop_gradient.
  """
  chex.assert_equal_shape([v_tm1, v_t, r_t, discount_t, done_t])
  trace = jnp.where(done_t, 0.0, discount_t * lambda_)

  def backward(advantage, step):
    td_error, decay = step
    advantage = td_error + decay * advantage
    return advantage, advantage

  td_errors = r_t + discount_t * v_t - v_tm1
  zero = jnp.zeros_like(td_errors[0])
  _, advantages = jax.lax.scan(backward, zero, (td_errors, trace), reverse=True)
  return GAEOutput(*jax.lax.stop_gradient((v_tm1 + advantages, advantages)))
