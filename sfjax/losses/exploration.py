"""Exploration bonus of one step: the entropy of the policy, as a loss."""

import chex
import jax
import jax.numpy as jnp


def entropy_loss(logits_tm1: jax.Array) -> jax.Array:
  """Computes minus the entropy of a categorical policy at every step, unreduced.

  The regulariser of "Asynchronous Methods for Deep Reinforcement Learning" (Mnih et
  al. 2016, arXiv:1602.01783, section 4). A masked action may have a logit of minus
  infinity: it adds nothing, and neither loss nor gradient becomes NaN.

  Args:
    logits_tm1: [T, ..., A] unnormalised log-probabilities of A actions, at least one
      of them finite; the gradient flows through them.

  Returns:
    [T, ...] minus the entropy in nats, between -log A and 0, to be averaged over
    valid samples by the caller.
  """
  chex.assert_axis_dimension_gt(logits_tm1, -1, 0)
  log_probs = jax.nn.log_softmax(logits_tm1)
  probs = jnp.exp(log_probs)
  # 0 · log 0 is 0 here; chosen before the product, since 0 · inf is NaN.
  return jnp.sum(probs * jnp.where(probs > 0, log_probs, 0.0), axis=-1)
