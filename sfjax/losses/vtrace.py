"""V-trace targets for trajectories collected by a slightly older policy."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class VTraceOutput(NamedTuple):
  targets: jax.Array  # [T, ...] critic regression targets v_s.
  advantages: jax.Array  # [T, ...] r + γ v_{s+1} - V(x_s) for λ = 1, not yet weighted.


def vtrace(
  v_tm1: jax.Array,
  v_t: jax.Array,
  r_t: jax.Array,
  discount_t: jax.Array,
  done_t: jax.Array,
  rho_tm1: jax.Array,
  *,
  rho_bar: float | jax.Array = 1.0,
  c_bar: float | jax.Array = 1.0,
  lambda_: float | jax.Array = 1.0,
) -> VTraceOutput:
  """Computes V-trace targets and advantages; time is axis 0, other axes are free.

  Implements eq. 1 of "IMPALA" (Espeholt et al. 2018, arXiv:1802.01561), with the λ of
  its remark 2, c = λ min(c_bar, π/μ), and a trace that stops at every episode end, so one
  trajectory may hold many episodes. Inputs must be finite everywhere; the caller makes
  unplayed slots neutral first.

  Differs from the paper: λ weights the next step's error in the advantage too (the paper
  says nothing of it there; rlax does the same), so that on-policy both outputs are those
  of GAE(λ). With λ = 1 the two agree.

  Args:
    v_tm1: [T, ...] value of the observation acted on.
    v_t: [T, ...] value of the observation that followed, *before* any reset: at
      an episode end this is the final observation, not the next episode's first.
    r_t: [T, ...] reward received for the action.
    discount_t: [T, ...] γ, or 0 where the episode terminated (not truncated).
    done_t: [T, ...] true where the episode ended for any reason.
    rho_tm1: [T, ...] unclipped ratio π(a|x) / μ(a|x).
    rho_bar: cap on ρ; decides which policy's values are learned.
    c_bar: cap on the trace coefficients c; trades speed against variance.
    lambda_: trades the bias of one-step errors (0) against the variance of full returns
      (1); GAE's λ.

  Returns:
    Targets for the critic and advantages for the actor, both behind a
    stop_gradient. The clipped surrogate multiplies the advantage by π/μ itself;
    the plain policy gradient of IMPALA multiplies it by min(rho_bar, rho_tm1).
  """
  chex.assert_equal_shape([v_tm1, v_t, r_t, discount_t, done_t, rho_tm1])
  rho = jnp.minimum(rho_bar, rho_tm1)
  trace = jnp.where(done_t, 0.0, discount_t * (lambda_ * jnp.minimum(c_bar, rho_tm1)))

  def backward(error, step):
    td_error, decay = step
    error = td_error + decay * error
    return error, error

  td_errors = rho * (r_t + discount_t * v_t - v_tm1)
  zero = jnp.zeros_like(td_errors[0])
  _, errors = jax.lax.scan(backward, zero, (td_errors, trace), reverse=True)

  # Within an episode v_t[s] is v_tm1[s + 1], so v_t + next error is v_{s+1}.
  next_errors = jnp.where(done_t, 0.0, lambda_ * jnp.concatenate([errors[1:], zero[None]]))
  advantages = r_t + discount_t * (v_t + next_errors) - v_tm1
  return VTraceOutput(*jax.lax.stop_gradient((v_tm1 + errors, advantages)))
