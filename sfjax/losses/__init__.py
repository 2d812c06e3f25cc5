"""Pure loss functions on plain arrays, time first: for the learner's update and for notebooks."""

from sfjax.losses.appo import appo_loss
from sfjax.losses.exploration import entropy_loss, symmetric_kl_loss
from sfjax.losses.gae import GAEOutput, gae
from sfjax.losses.surrogate import clipped_surrogate_loss, policy_gradient_loss
from sfjax.losses.transitions import (
  TransitionMasks,
  Transitions,
  neutral_transitions,
  transition_masks,
)
from sfjax.losses.value import clipped_value_loss
from sfjax.losses.vtrace import VTraceOutput, vtrace

__all__ = [
  'GAEOutput',
  'TransitionMasks',
  'Transitions',
  'VTraceOutput',
  'appo_loss',
  'clipped_surrogate_loss',
  'clipped_value_loss',
  'entropy_loss',
  'gae',
  'neutral_transitions',
  'policy_gradient_loss',
  'symmetric_kl_loss',
  'transition_masks',
  'vtrace',
]
