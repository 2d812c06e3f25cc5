"""Builds the learner of a run, from a checkpoint if there is one, and runs it. Imports jax."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from sfjax.checkpoints import Checkpoints, Progress
from sfjax.config import Config, Schedule, core_size, trajectories_per_batch, updates_per_batch
from sfjax.entries import Shared
from sfjax.learner.batcher import Batcher, batch_specs
from sfjax.learner.devices import first_replica, pmap_prepare, pmap_shuffled_update, replicate
from sfjax.learner.learner import Learner
from sfjax.learner.minibatches import Prepare, ShuffledUpdate, make_prepare, shuffled_update
from sfjax.learner.optimizer import make_optimizer
from sfjax.learner.schedules import SCHEDULES
from sfjax.learner.update import (
  LearnerState,
  default_microbatch,
  init_state,
  make_hyperparams,
  make_update,
)
from sfjax.machine import has_nvidia_device
from sfjax.metrics.stages import Stage, StageTimer
from sfjax.models.actor_critic import init_params, make_model
from sfjax.models.flat_params import flat_nbytes
from sfjax.shm.params import ParameterBuffer
from sfjax.specs import EnvSpec


def initial_states(config: Config, env: EnvSpec) -> list[LearnerState]:
  """Returns fresh states, a different one for each policy."""
  model, optimizer = make_model(config, env), optimizer_of(config)

  @jax.jit
  def make(key: jax.Array) -> LearnerState:
    return init_state(init_params(model, key, env, core_size(config)), optimizer)

  key = jax.random.key(config.train.seed)
  return [make(jax.random.fold_in(key, i)) for i in range(config.train.num_policies)]


def optimizer_of(config: Config) -> optax.GradientTransformation:
  """Returns the optimizer that a configuration names."""
  learner = config.learner
  return make_optimizer(
    learner.optimizer.value,
    beta1=learner.adam_beta1,
    beta2=learner.adam_beta2,
    eps=learner.adam_eps,
    weight_decay=learner.weight_decay,
  )


def compiled_update(config: Config, env: EnvSpec) -> tuple[ShuffledUpdate, Prepare | None]:
  """Returns the pmapped update of a configuration, and what comes before several on one batch.

  Raises:
    ValueError: minibatches or micro-batches do not fit the devices.
  """
  model, minibatches = make_model(config, env), config.learner.minibatches
  share = trajectories_per_batch(config) // jax.local_device_count()
  if share % minibatches:
    raise ValueError(
      f'learner.minibatches {minibatches} does not divide the {share} trajectories that each of '
      f'{jax.local_device_count()} devices has of a batch'
    )
  observations = (config.learner.rollout + 1) * share // minibatches
  platform = jax.default_backend()
  microbatch = config.learner.microbatch or default_microbatch(
    observations, platform, config.model.encoder
  )
  if observations % microbatch:
    raise ValueError(
      f'learner.microbatch {microbatch} does not divide the {observations} observations that each '
      f'of {jax.local_device_count()} devices has of a minibatch'
    )
  update = make_update(
    model,
    optimizer_of(config),
    action=env.action,
    loss=config.loss,
    microbatch=microbatch,
    adapts_rate=config.learner.schedule is Schedule.KL_ADAPTIVE,
  )
  step = pmap_shuffled_update(shuffled_update(update, minibatches=minibatches))
  if updates_per_batch(config) == 1:
    return step, None
  return step, pmap_prepare(make_prepare(model, loss=config.loss, microbatch=microbatch))


def run_learner(
  shared: Shared,
  status: dict[str, np.ndarray],
  timer: StageTimer,
  should_stop: Callable[[], bool],
  *,
  trains: bool,
) -> None:
  """Builds the learner, trains until told to stop, and saves."""
  learner, saver = build_learner(shared, status, timer, trains=trains)
  learner.run(should_stop, saver.save_if_asked)
  saver.save()


def build_learner(
  shared: Shared, status: dict[str, np.ndarray], timer: StageTimer, *, trains: bool
) -> tuple[Learner, 'Saver']:
  """Restores or initialises, publishes and compiles."""
  _name_platform()
  status['platform_named'][0] = 1
  config = shared.config
  states = initial_states(config, shared.env)
  checkpoints = Checkpoints(Path(shared.workdir), keep=config.checkpoint.keep) if trains else None
  if checkpoints is not None and checkpoints.steps():
    restored = checkpoints.restore(states)
    states = restored.states
    for name, values in restored.progress._asdict().items():
      status[name][:] = values
    print(f'learner: resumed from checkpoint {restored.step} at {values_text(status)}', flush=True)
  learner = _make_learner(shared, status, timer, states, trains=trains)
  for policy in range(config.train.num_policies):
    learner.publish(policy)
  status['published'][0] = 1
  if trains:
    timer.enter(Stage.COMPILE)
    warm_up(learner, shared)
  status['learner_ready'][0] = 1
  return learner, Saver(checkpoints, learner, status, timer)


def values_text(status: dict[str, np.ndarray]) -> str:
  """Frames of each policy, for a log line."""
  return ', '.join(f'{frames:,} frames' for frames in status['frames'])


class Saver:
  """Saves when the runtime asks; a failure to save is told and never ends the run."""

  def __init__(
    self,
    checkpoints: Checkpoints | None,
    learner: Learner,
    status: dict[str, np.ndarray],
    timer: StageTimer,
  ) -> None:
    self._checkpoints, self._learner = checkpoints, learner
    self._status, self._timer = status, timer
    self._done = int(status['saves_asked'][0])

  def save_if_asked(self) -> None:
    """Saves once for any number of requests since the last time."""
    asked = int(self._status['saves_asked'][0])
    if asked != self._done:
      self._done = asked
      self.save()

  def save(self) -> None:
    """Saves the present states."""
    if self._checkpoints is None:
      return
    self._timer.enter(Stage.SAVE)
    status = self._status
    progress = Progress(*(status[name].tolist() for name in Progress._fields))
    try:
      states = [first_replica(state) for state in self._learner.states]
      self._checkpoints.save(states, progress)
    except (OSError, ValueError) as error:
      print(f'learner: checkpoint not saved, training goes on: {error!r}', flush=True)


def warm_up(learner: Learner, shared: Shared) -> None:
  """Compiles the update on a batch without a played slot, which leaves every state as it was."""
  specs = batch_specs(
    shared.map_slab(),
    num_devices=jax.local_device_count(),
    trajectories=trajectories_per_batch(shared.config),
  )
  learner.compile({name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()})


def _make_learner(
  shared: Shared,
  status: dict[str, np.ndarray],
  timer: StageTimer,
  states: list[LearnerState],
  *,
  trains: bool,
) -> Learner:
  config = shared.config
  nbytes = flat_nbytes(states[0].params)
  batcher = Batcher(
    topology=shared.topology,
    slab=shared.map_slab(),
    streams=shared.map_streams(),
    trajectories=shared.trajectories,
    replies=shared.replies,
    num_policies=config.train.num_policies,
    num_devices=jax.local_device_count(),
    batch_trajectories=trajectories_per_batch(config),
    trains=trains,
    synchronous=config.train.synchronous,
  )
  replicated: list[Any] = [replicate(state) for state in states]
  update, prepare = compiled_update(config, shared.env)
  return Learner(
    update=update,
    prepare=prepare,
    states=replicated,
    hyperparams=[make_hyperparams(config)] * len(states),
    schedule=partial(
      SCHEDULES[config.learner.schedule.value],
      total_frames=config.train.max_frames,
      end=config.learner.final_learning_rate,
    ),
    epochs=config.learner.epochs,
    minibatches=config.learner.minibatches,
    max_kl=config.learner.max_kl,
    seed=config.train.seed,
    frameskip=config.env.frameskip,
    max_frames=config.train.max_frames,
    batcher=batcher,
    params=ParameterBuffer(
      shared.params, num_policies=config.train.num_policies, nbytes=nbytes, allocate=True
    ),
    requests=shared.requests,
    updates=shared.updates,
    status=status,
    timer=timer,
    workdir=Path(shared.workdir),
  )


def _name_platform() -> None:
  devices = jax.local_devices()
  print(
    f'platform {devices[0].platform}, devices {[str(device) for device in devices]}', flush=True
  )
  if has_nvidia_device() and devices[0].platform == 'cpu':
    print(
      "warning: this machine has an NVIDIA device that jax does not see; install 'sfjax[cuda12]' "
      "or 'sfjax[cuda13]'",
      flush=True,
    )
