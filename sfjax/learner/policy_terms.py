"""What the current policy says of the actions in a batch, for the loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfjax.config import Exploration
from sfjax.losses import symmetric_kl_loss
from sfjax.models import distributions
from sfjax.specs import ActionSpec


class PolicyTerms(NamedTuple):
  """Arguments of `appo_loss`, [T, B] each."""

  log_prob_tm1: jax.Array
  entropy_tm1: jax.Array
  exploration_tm1: jax.Array | None  # None: minus the entropy.
  kl_tm1: jax.Array | None  # None: the distribution that acted is not stored.


def policy_terms(
  spec: ActionSpec,
  params: jax.Array,
  actions: jax.Array,
  valid: jax.Array,
  *,
  mask: jax.Array | None = None,
  behaviour_params: jax.Array | None = None,
  exploration: Exploration = Exploration.ENTROPY,
) -> PolicyTerms:
  """Computes log-probabilities, entropy, exploration loss and KL(π‖μ) of every step.

  Args:
    spec: what an action consists of.
    params: [T, B, P] of the current policy's distribution; gradients flow through them.
    actions: [T, B, A] stored actions.
    valid: bool [T, B] which steps count. The others may hold any action, mask and behaviour
      parameters: neutral ones take their place before any arithmetic, for in a gradient 0 · NaN
      is NaN.
    mask: bool [T, B, L] the alternatives that were allowed, or none.
    behaviour_params: [T, B, P] of the distribution that acted, if stored.
    exploration: which exploration loss.

  Returns:
    The terms; where a step is not valid they mean nothing.
  """
  counts = valid[..., None]
  actions = jnp.where(counts, actions, jnp.zeros_like(actions))
  mask = None if mask is None else mask | ~counts
  symmetric_kl = kl = None
  if exploration is Exploration.SYMMETRIC_KL:
    symmetric_kl = symmetric_kl_loss(distributions.symmetric_kl_to_uniform(spec, params, mask))
  if behaviour_params is not None:
    kl = distributions.kl(spec, params, jnp.where(counts, behaviour_params, 0.0), mask)
  return PolicyTerms(
    distributions.log_prob(spec, params, actions, mask),
    distributions.entropy(spec, params, mask),
    symmetric_kl,
    kl,
  )
