"""What the losses know of each step, derived from the facts that the slab stores."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class TransitionMasks(NamedTuple):
  discount_t: jax.Array  # [T, ...] γ, or 0 where the episode terminated.
  done_t: jax.Array  # [T, ...] true where the trace stops.


class Transitions(NamedTuple):
  """The first arguments of `gae` and `vtrace`, [T, ...] each."""

  v_tm1: jax.Array
  v_t: jax.Array
  r_t: jax.Array
  discount_t: jax.Array
  done_t: jax.Array


def transition_masks(
  terminated: jax.Array, first: jax.Array, played: jax.Array, *, gamma: float | jax.Array
) -> TransitionMasks:
  """Derives the discount and the episode ends from the stored facts, in this order.

  A truncated episode's final observation takes an unplayed slot, so an end shows as
  `terminated`, or as the next slot being unplayed or the first of an episode. Slot T
  counts as played: no step after it could leak back.

  Args:
    terminated: bool [T, ...] the action ended the episode for good; wins over truncation.
    first: bool [T+1, ...] the slot's observation is an episode's first.
    played: bool [T, ...] an action was taken in the slot.
    gamma: discount per step, in [0, 1].

  Returns:
    The discount for the next value, and where the trace stops; unplayed slots are not
    yet made neutral.
  """
  chex.assert_type([terminated, first, played], bool)
  chex.assert_equal_shape([terminated, played, first[1:]])
  discount_t = jnp.where(terminated, 0.0, gamma)
  next_unplayed = jnp.concatenate([~played[1:], jnp.zeros_like(played[:1])])
  return TransitionMasks(discount_t, terminated | first[1:] | next_unplayed)


def neutral_transitions(
  values: jax.Array,
  rewards: jax.Array,
  terminated: jax.Array,
  played: jax.Array,
  valid: jax.Array,
  first: jax.Array,
  *,
  gamma: float | jax.Array,
) -> Transitions:
  """Collects what `gae` and `vtrace` take, with 0 and a stopped trace where nothing is valid.

  The numbers are chosen *before* any arithmetic: 0 · NaN is NaN, in gradients too.

  Args:
    values: [T+1, ...] critic of every observation, final ones included.
    rewards: [T, ...] reward received for the action.
    terminated: bool [T, ...] the action ended the episode for good.
    played: bool [T, ...] an action was taken in the slot.
    valid: bool [T, ...] the sample may be trained on; false where not played.
    first: bool [T+1, ...] the slot's observation is an episode's first.
    gamma: discount per step.

  Returns:
    Finite numbers in every slot, whatever the ones that are not valid hold.
  """
  chex.assert_equal_shape([values[1:], rewards, terminated, played, valid, first[1:]])
  discount_t, done_t = transition_masks(terminated, first, played, gamma=gamma)
  v_tm1, r_t, discount_t = (jnp.where(valid, x, 0.0) for x in (values[:-1], rewards, discount_t))
  # Slot t + 1 may be unplayed: its value is then the bootstrap of a truncated episode.
  # After a termination it may never have been written, so nothing reads it.
  v_t = jnp.where(valid & ~terminated, values[1:], 0.0)
  return Transitions(v_tm1, v_t, r_t, discount_t, done_t | ~valid)
