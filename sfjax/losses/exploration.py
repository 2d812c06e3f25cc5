"""Exploration losses of one step, from what the action distributions compute: minus the entropy,
or the divergence from uniform. Descending on either makes the policy more random."""

import jax
import jax.numpy as jnp


def entropy_loss(entropy_tm1: jax.Array) -> jax.Array:
  """Computes minus the entropy of every step, unreduced.

  The regulariser of "Asynchronous Methods for Deep Reinforcement Learning" (Mnih et
  al. 2016, arXiv:1602.01783, section 4).

  Args:
    entropy_tm1: [T, ...] entropy of the whole action, in nats; the gradient flows through it.

  Returns:
    [T, ...] loss of each step, to be averaged over valid samples by the caller.
  """
  return -entropy_tm1


def symmetric_kl_loss(symmetric_kl_tm1: jax.Array, *, cap: float | jax.Array = 30.0) -> jax.Array:
  """Computes the symmetric divergence from uniform of every step, unreduced.

  ½ [KL(p‖u) + KL(u‖p)], the option of "Sample Factory" (Petrenko et al. 2020,
  arXiv:2006.11751). Where the entropy's gradient dies as an action's probability goes to 0,
  this one keeps pulling it back.

  Differs from Sample Factory: the cap is on each step and not on the mean, so that some
  collapsed steps do not end the exploration of all others, and devices need not agree first.

  Args:
    symmetric_kl_tm1: [T, ...] of the whole action, in nats; the gradient flows through it.
      A part that has no uniform distribution counts with minus its entropy, see
      `distributions.symmetric_kl_to_uniform`.
    cap: largest divergence of a step that counts; a step above it has no gradient.

  Returns:
    [T, ...] loss of each step, to be averaged over valid samples by the caller.
  """
  return jnp.minimum(symmetric_kl_tm1, cap)
