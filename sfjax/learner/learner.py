"""The learner: trains every policy on its batches and publishes each new version.

Takes batches from the batcher, writes parameters to the parameter buffer, counters to the status
block, one record an update to the runtime, checkpoints when asked.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sfjax.learner.batcher import Batcher, ReadyBatch
from sfjax.learner.devices import first_replica
from sfjax.learner.minibatches import Prepare, Shuffle, ShuffledUpdate, leaves_batch
from sfjax.learner.update import Hyperparams, LearnerState
from sfjax.metrics.records import UPDATE_METRICS
from sfjax.metrics.stages import Stage, StageTimer
from sfjax.models.flat_params import flatten_params
from sfjax.shm.params import ParameterBuffer
from sfjax.shm.queues import RecordQueue

MAX_NON_FINITE = 3


class NonFiniteError(RuntimeError):
  """Several updates in a row were not finite."""


class Learner:
  """Trains P policies, one compiled update for all."""

  def __init__(
    self,
    *,
    update: ShuffledUpdate,
    prepare: Prepare | None,
    states: list[LearnerState],
    hyperparams: list[Hyperparams],
    schedule: Callable[..., float],
    epochs: int,
    minibatches: int,
    max_kl: float | None,
    seed: int,
    frameskip: int,
    max_frames: int,
    batcher: Batcher,
    params: ParameterBuffer,
    requests: RecordQueue,
    updates: RecordQueue,
    status: dict[str, np.ndarray],
    timer: StageTimer,
    workdir: Path,
  ) -> None:
    self._update, self.states, self._hyperparams = update, states, hyperparams
    self._prepare, self._minibatches, self._max_kl = prepare, minibatches, max_kl
    self._seed, self._epochs = seed, epochs
    self._schedule = schedule  # Of the learning rate: (frames, start=the rate at frame 0).
    self._frameskip, self._max_frames = frameskip, max_frames
    self.batcher, self._params, self._requests = batcher, params, requests
    self._updates, self._status, self._timer = updates, status, timer
    self._workdir = workdir
    self._non_finite = [0] * len(states)
    self._ready = threading.Event()

  def turn(self) -> bool:
    """Trains on one batch if one is ready; returns whether it did."""
    if not self.batcher.ready:
      return False
    batch = self.batcher.ready.popleft()
    if self._status['frames'][batch.policy] < self._max_frames:
      self._train(batch)
    else:
      self.batcher.give_back(batch, ())  # In flight when the budget was spent: not counted.
    return True

  def run(
    self, should_stop: Callable[[], bool], save_if_asked: Callable[[], None], timeout_s: float = 0.5
  ) -> None:
    """Takes turns, with the batcher in a thread of its own, until told to stop."""
    failure: list[BaseException] = []
    ended = threading.Event()

    def feed() -> None:
      try:
        while not (should_stop() or ended.is_set()):
          self.batcher.turn()
          if self.batcher.ready:
            self._ready.set()
          self.batcher.wait(timeout_s)
      except BaseException as error:  # Raised again in the main thread.
        failure.append(error)
        self._ready.set()

    thread = threading.Thread(target=feed, name='batcher')
    thread.start()
    try:
      while not should_stop() and not failure:
        self._ready.clear()
        if not self.turn():
          self._timer.enter(Stage.WAIT_BATCH)
          self._ready.wait(timeout_s)
        save_if_asked()
    finally:  # A thread that goes on would keep the process of a failed learner alive.
      ended.set()
      self.batcher.wake()
      thread.join()
    if failure:
      raise failure[0]

  def compile(self, batch: dict[str, np.ndarray]) -> None:
    """Compiles the update by running it on a batch without a played slot, which changes nothing."""
    for policy, state in enumerate(self.states):
      arrays: Any = batch
      hyperparams = self._hyperparams[policy]
      if self._prepare is not None:
        arrays = self._prepare(state, arrays, hyperparams)
      shuffle = Shuffle(self._seed, policy, 0, 0, 0)
      self.states[policy], _ = self._update(state, arrays, hyperparams, shuffle)

  def publish(self, policy: int) -> None:
    """Publishes the present parameters of `policy` and wakes the inference server."""
    state = first_replica(self.states[policy])
    version = int(state.version)
    self._params.publish(policy, version, flatten_params(state.params))
    self._status['version'][policy] = version
    self._requests.put(-1, 0, 0, -1, version)

  def _train(self, batch: ReadyBatch) -> None:
    policy = batch.policy
    hyperparams, version = self._scheduled(policy), int(self._status['version'][policy])
    self._timer.enter(Stage.UPDATE)
    arrays: Any = batch.buffer
    if self._prepare is not None:
      arrays = self._prepare(self.states[policy], arrays, hyperparams)
    metrics: dict[str, jax.Array] = {}
    for epoch in range(self._epochs):
      steps = []
      for index in range(self._minibatches):
        shuffle = Shuffle(self._seed, policy, version, epoch, index)
        self._timer.enter(Stage.UPDATE)
        state, metrics = self._update(self.states[policy], arrays, hyperparams, shuffle)
        self.states[policy] = state
        steps.append({name: float(value) for name, value in first_replica(metrics).items()})
        self._after_update(batch, steps[-1], first_epoch=epoch == 0)
      if leaves_batch(steps, max_kl=self._max_kl):
        break
    self.batcher.give_back(batch, metrics)

  def _scheduled(self, policy: int) -> Hyperparams:
    hyperparams, frames = self._hyperparams[policy], int(self._status['frames'][policy])
    rate = self._schedule(frames, start=hyperparams.learning_rate)
    return hyperparams._replace(learning_rate=rate)

  def _after_update(
    self, batch: ReadyBatch, values: dict[str, float], *, first_epoch: bool
  ) -> None:
    policy = batch.policy
    if first_epoch:  # In which every sample is seen once.
      self._count(policy, values)
    self._check_finite(batch, values)
    if values['applied']:
      self._timer.enter(Stage.PUBLISH)
      self.publish(policy)
      numbers = (values.get(name, np.nan) for name in UPDATE_METRICS)
      self._updates.put(policy, int(self._status['version'][policy]), *numbers)

  def _count(self, policy: int, values: dict[str, float]) -> None:
    status, valid = self._status, int(values['valid_count'])
    if values['applied']:
      status['samples'][policy] += valid
      status['frames'][policy] += valid * self._frameskip
      status['samples_dropped'][policy] += int(values['played_count']) - valid
    else:
      status['samples_dropped'][policy] += int(values['played_count'])
    status['samples_dropped'][policy] += self.batcher.samples_discarded[policy]
    self.batcher.samples_discarded[policy] = 0

  def _check_finite(self, batch: ReadyBatch, values: dict[str, float]) -> None:
    policy = batch.policy
    if values['finite']:
      self._non_finite[policy] = 0
      return
    self._non_finite[policy] += 1
    path = self._workdir / f'non_finite_batch_{policy}_{self._non_finite[policy]}.npz'
    print(
      f'learner: the update of policy {policy} at version {self._status["version"][policy]} is '
      f'not finite; parameters kept, batch in {path}',
      flush=True,
    )
    arrays: Any = {name.replace('/', '.'): array for name, array in batch.buffer.items()}
    try:
      np.savez(path, **arrays)
    except OSError as error:
      print(f'learner: {path} not written, training goes on: {error}', flush=True)
    if self._non_finite[policy] >= MAX_NON_FINITE:
      raise NonFiniteError(
        f'policy {policy}: {MAX_NON_FINITE} updates in a row were not finite. The batches are in '
        f'{self._workdir}; look for extreme rewards or observations, or lower '
        f'learner.learning_rate {self._hyperparams[policy].learning_rate}.'
      )
