"""Several updates on one batch: what they share, how it is shuffled into minibatches, and when
to leave it. Every minibatch is one SGD step and one version."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfjax import config as config_lib
from sfjax.learner.update import (
  AXIS,
  Batch,
  Hyperparams,
  LearnerState,
  Metrics,
  Update,
  forward,
  lag_and_valid,
)
from sfjax.losses import gae, neutral_transitions
from sfjax.models.actor_critic import ActorCritic

Prepare = Callable[[LearnerState, Batch, Hyperparams], Batch]
ShuffledUpdate = Callable[
  [LearnerState, Batch, Hyperparams, 'Shuffle'], tuple[LearnerState, Metrics]
]


class Shuffle(NamedTuple):
  """Names one minibatch; the order of trajectories is drawn from all but its index."""

  seed: int
  policy: int
  version: int  # Of the policy before the first update on the batch.
  epoch: int
  index: int  # Which minibatch of the epoch.


def make_prepare(model: ActorCritic, *, loss: config_lib.LossConfig, microbatch: int) -> Prepare:
  """Returns `prepare(state, batch, hyperparams) -> batch`, for several updates on a batch.

  It brings a batch to the device once, and fixes what must not move with the updates: the
  `entry_version`, from which every update counts lag, and with GAE `targets` and `advantages`
  under the parameters that enter. V-trace is computed again in every update, under the
  parameters of that update: its weights correct for exactly the change since acting.
  """

  def prepare(state: LearnerState, batch: Batch, hyperparams: Hyperparams) -> Batch:
    batch = batch | {'entry_version': state.version}
    if loss.use_vtrace:
      return batch
    _, valid = lag_and_valid(state, batch, hyperparams)
    transitions = neutral_transitions(
      forward(model, state.params, batch, microbatch).values,
      batch['rewards'],
      batch['terminated'],
      batch['played'],
      valid,
      batch['first'],
      gamma=hyperparams.gamma,
    )
    return batch | gae(*transitions, lambda_=hyperparams.gae_lambda)._asdict()

  return prepare


def take_minibatch(
  batch: Batch, shuffle: Shuffle, *, minibatches: int, axis_name: str | None = AXIS
) -> Batch:
  """Selects the trajectories of a minibatch.

  In an epoch every trajectory is in one minibatch. Each device shuffles its own share.

  Args:
    batch: fields [T or T+1, B, ...], `core` [B, C]; scalars are kept as they are.
    shuffle: which minibatch; traced, so that none compiles anew.
    minibatches: how many there are in an epoch.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    The same fields of B / minibatches trajectories.

  Raises:
    ValueError: the trajectories cannot be divided evenly.
  """
  if minibatches == 1:
    return batch
  trajectories = len(batch['core'])
  if trajectories % minibatches:
    raise ValueError(
      f'the {trajectories} trajectories that a device has of a batch cannot be divided into '
      f'learner.minibatches {minibatches}; use a divisor of {trajectories}'
    )
  key = jax.random.key(shuffle.seed)
  for part in (shuffle.policy, shuffle.version, shuffle.epoch):
    key = jax.random.fold_in(key, part)
  if axis_name is not None:
    key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
  size = trajectories // minibatches
  order = jax.random.permutation(key, trajectories)
  chosen = jax.lax.dynamic_slice(order, (shuffle.index * size,), (size,))

  def take(name: str, array: jax.Array) -> jax.Array:
    if array.ndim == 0:
      return array
    return jnp.take(array, chosen, axis=0 if name == 'core' else 1, mode='clip')

  return {name: take(name, array) for name, array in batch.items()}


def shuffled_update(
  update: Update, *, minibatches: int, axis_name: str | None = AXIS
) -> ShuffledUpdate:
  """Returns `update(state, batch, hyperparams, shuffle)`, a step on one minibatch of a batch.

  Args:
    update: as `make_update` returns it, its micro-batches made for a minibatch.
    minibatches: how many there are in an epoch; with 1 the batch is taken as it is.
    axis_name: pmap axis whose devices share the batch; None for one device.
  """

  def step(
    state: LearnerState, batch: Batch, hyperparams: Hyperparams, shuffle: Shuffle
  ) -> tuple[LearnerState, Metrics]:
    minibatch = take_minibatch(batch, shuffle, minibatches=minibatches, axis_name=axis_name)
    minibatch = minibatch | {'seen': jnp.asarray(shuffle.epoch > 0)}
    return update(state, minibatch, hyperparams)

  return step


def leaves_batch(epoch: Sequence[dict[str, float]], *, max_kl: float | None) -> bool:
  """Tells after an epoch whether to leave out those that remain.

  Another epoch does the same where nothing was trained on or something was not finite, and
  harm where the policy is already too far from the one that acted.

  Args:
    epoch: metrics of every minibatch of the epoch.
    max_kl: largest mean KL(π‖μ) of the epoch's samples, in nats, each minibatch's measured
      before its own step; None: no limit.
  """
  if not any(values['applied'] for values in epoch) or not all(v['finite'] for v in epoch):
    return True
  if max_kl is None:
    return False
  count = sum(values['valid_count'] for values in epoch)
  return sum(values['kl'] * values['valid_count'] for values in epoch) > max_kl * count
