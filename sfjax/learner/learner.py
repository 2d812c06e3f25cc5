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
from sfjax.learner.update import Hyperparams, LearnerState, Update
from sfjax.metrics.records import LAG_METRICS, UPDATE_METRICS
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
    update: Update,
    states: list[LearnerState],
    hyperparams: list[Hyperparams],
    epochs: int,
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
    self._epochs, self._frameskip, self._max_frames = epochs, frameskip, max_frames
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
      self.states[policy], _ = self._update(state, arrays, self._hyperparams[policy])

  def publish(self, policy: int) -> None:
    """Publishes the present parameters of `policy` and wakes the inference server."""
    state = first_replica(self.states[policy])
    version = int(state.version)
    self._params.publish(policy, version, flatten_params(state.params))
    self._status['version'][policy] = version
    self._requests.put(-1, 0, 0, -1, version)

  def _train(self, batch: ReadyBatch) -> None:
    policy = batch.policy
    arrays: Any = batch.buffer
    metrics: dict[str, jax.Array] = {}
    lag: dict[str, float] = {}
    for epoch in range(self._epochs):
      self._timer.enter(Stage.UPDATE)
      state, metrics = self._update(self.states[policy], arrays, self._hyperparams[policy])
      self.states[policy] = state
      values = {name: float(value) for name, value in first_replica(metrics).items()}
      if epoch == 0:
        self._count(policy, values)
        lag = {name: values[name] for name in LAG_METRICS}
      values |= lag  # Of the samples when the batch came, not of our own epochs.
      self._check_finite(batch, values)
      if not values['applied']:
        break  # The next epoch would do the same.
      self._timer.enter(Stage.PUBLISH)
      self.publish(policy)
      version = int(self._status['version'][policy])
      self._updates.put(policy, version, *(values[name] for name in UPDATE_METRICS))
    self.batcher.give_back(batch, metrics)

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
