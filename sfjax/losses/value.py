"""Critic loss of one step: a squared error that keeps the critic near the one that acted."""

import chex
import jax
import jax.numpy as jnp


def clipped_value_loss(
  v_tm1: jax.Array,
  behaviour_v_tm1: jax.Array,
  targets_tm1: jax.Array,
  *,
  clip: float | jax.Array = 0.2,
) -> jax.Array:
  """Computes the clipped squared error of every step, unreduced.

  The larger of the plain squared error and that of a value held within `clip` of
  the value at acting time: the critic gains nothing by moving farther in one go.
  Described, not in the PPO paper, in "Implementation Matters in Deep Policy Gradients"
  (Engstrom et al. 2020, arXiv:2005.12729, section 3). There is no factor 1/2.

  Args:
    v_tm1: [T, ...] value of the current critic; the gradient flows through it.
    behaviour_v_tm1: [T, ...] value of the same observation when it was acted on.
    targets_tm1: [T, ...] regression targets. No gradient flows through them.
    clip: largest change of the value that pays, in units of the return.

  Returns:
    [T, ...] loss of each step, to be averaged over valid samples by the caller.
  """
  chex.assert_equal_shape([v_tm1, behaviour_v_tm1, targets_tm1])
  behaviour_v, targets = jax.lax.stop_gradient((behaviour_v_tm1, targets_tm1))
  clipped = behaviour_v + jnp.clip(v_tm1 - behaviour_v, -clip, clip)
  return jnp.maximum(jnp.square(v_tm1 - targets), jnp.square(clipped - targets))
