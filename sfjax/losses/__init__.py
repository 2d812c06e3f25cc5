"""Pure loss functions on plain arrays, time first: for the learner's update and for notebooks."""

from sfjax.losses.appo import TransitionMasks, appo_loss, transition_masks
from sfjax.losses.exploration import entropy_loss
from sfjax.losses.gae import GAEOutput, gae
from sfjax.losses.surrogate import clipped_surrogate_loss, policy_gradient_loss
from sfjax.losses.value import clipped_value_loss
from sfjax.losses.vtrace import VTraceOutput, vtrace

__all__ = [
  'GAEOutput',
  'TransitionMasks',
  'VTraceOutput',
  'appo_loss',
  'clipped_surrogate_loss',
  'clipped_value_loss',
  'entropy_loss',
  'gae',
  'policy_gradient_loss',
  'transition_masks',
  'vtrace',
]
