"""The inference server: answers the requests of all workers with batched policy steps.

Reads observations from the slab at the places the stream table names, writes actions and what
belongs to them into the mailboxes, and tells the workers on their own queues. Free of jax: the
policies are handed in.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sfjax.inference.batching import Selection, bucket_sizes, select
from sfjax.metrics.stages import Stage, StageTimer
from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import Topology
from sfjax.specs import MASK, ArraySpec, EnvSpec, array_spec

Arrays = dict[str, np.ndarray]


class Answer(NamedTuple):
  """A policy's actions for the first n rows of a batch, on the host."""

  action: np.ndarray
  log_prob: np.ndarray
  value: np.ndarray
  core: np.ndarray
  params: np.ndarray  # Of the distribution that the action was drawn from.
  version: int


class Policies(Protocol):
  """What acts behind a server."""

  def refresh(self, policy: int) -> None:
    """Takes over the newest parameters of a policy."""
    ...

  def buffer(self) -> Arrays:
    """Returns a batch buffer that may be written now."""
    ...

  def act(self, policy: int, buffer: Arrays, n: int, bucket: int) -> Answer:
    """Acts on the first `n` rows of `buffer`, padded to `bucket` rows."""
    ...


def batch_specs(topology: Topology, env: EnvSpec, core_size: int) -> dict[str, ArraySpec]:
  """Returns the specs of the largest inference batch."""
  n = topology.num_streams
  specs = {f'obs/{key}': ArraySpec((n, *spec.shape), spec.dtype) for key, spec in env.obs.items()}
  specs['core'] = array_spec(np.float32, n, core_size)
  specs['first'] = array_spec(bool, n)
  specs['identity'] = array_spec(np.int32, n, 5)
  if env.mask_size:
    specs[MASK] = array_spec(bool, n, env.mask_size)
  return specs


class Server:
  """One inference server."""

  def __init__(
    self,
    *,
    policies: Policies,
    num_policies: int,
    topology: Topology,
    slab: Arrays,
    streams: Arrays,
    requests: RecordQueue,
    replies: Sequence[RecordQueue],
    timer: StageTimer,
    acted: np.ndarray,
    learner_versions: np.ndarray,
    seed: int,
  ) -> None:
    self._policies, self._num_policies = policies, num_policies
    self._topology, self._streams = topology, streams
    self._requests, self._replies = requests, replies
    self._timer, self._acted, self._seed = timer, acted, seed
    self._learner_versions = learner_versions  # [P], which the learner writes.
    self._buckets = bucket_sizes(topology)
    slots = topology.num_rows * (topology.rollout + 1)
    self._obs = {
      name: array.reshape(slots, *array.shape[2:])
      for name, array in slab.items()
      if name.startswith('obs/')
    }
    self._first = slab['first'].reshape(slots)
    mask = slab.get(MASK)
    self._mask = None if mask is None else mask.reshape(-1, mask.shape[-1])

  def turn(self) -> bool:
    """Serves every request that waits; returns whether there was one."""
    records = self._requests.get_all()
    for policy in range(self._num_policies):
      self._timer.enter(Stage.LOAD_PARAMS)
      self._policies.refresh(policy)  # Before each batch: one may take long enough for an update.
      requests = records[records['policy'] == policy]
      if len(requests):
        self._serve(policy, requests)
    return bool((records['policy'] >= 0).any())

  def run(self, should_stop: Callable[[], bool], *, timeout_s: float = 0.5) -> None:
    """Takes turns until told to stop."""
    while not should_stop():
      self._timer.enter(Stage.WAIT_REQUESTS)
      if self._requests.wait(timeout_s):
        self.turn()

  def _serve(self, policy: int, requests: np.ndarray) -> None:
    selection = select(requests, self._topology, self._streams, policy)
    n = len(selection.streams)
    if n:
      self._timer.enter(Stage.GATHER)
      buffer = self._policies.buffer()
      self._gather(policy, selection.streams, buffer)
      self._timer.enter(Stage.ACT)
      bucket = next(size for size in self._buckets if size >= n)
      answer = self._policies.act(policy, buffer, n, bucket)
      self._timer.enter(Stage.SCATTER)
      self._scatter(policy, selection, answer)
      self._acted[0] += n
    for request, served in zip(requests, selection.served, strict=True):
      # A full queue is that of a dead worker: a living one holds at most a record a split and row.
      self._replies[request['worker']].put(
        request['generation'], request['split'], served, request['tick']
      )

  def _gather(self, policy: int, streams: np.ndarray, buffer: Arrays) -> None:
    n, table = len(streams), self._streams
    slots = table['row'][streams] * (self._topology.rollout + 1) + table['slot'][streams]
    for name, array in self._obs.items():
      np.take(array, slots, axis=0, out=buffer[name][:n], mode='clip')
    np.take(self._first, slots, out=buffer['first'][:n], mode='clip')
    if self._mask is not None:  # Slot T has none: nothing is acted there.
      acted = table['row'][streams] * self._topology.rollout + table['slot'][streams]
      np.take(self._mask, acted, axis=0, out=buffer[MASK][:n], mode='clip')
    np.take(table['core'], streams, axis=0, out=buffer['core'][:n], mode='clip')
    identity: Any = buffer['identity'][:n]
    identity[:, 0] = self._seed
    identity[:, 1] = policy
    identity[:, 2] = streams
    identity[:, 3] = table['episode'][streams]
    identity[:, 4] = table['step'][streams]

  def _scatter(self, policy: int, selection: Selection, answer: Answer) -> None:
    table, streams = self._streams, selection.streams
    table['reply_action'][streams] = answer.action
    if 'reply_params' in table:
      table['reply_params'][streams] = answer.params
    table['reply_log_prob'][streams] = answer.log_prob
    table['reply_value'][streams] = answer.value
    table['reply_core'][streams] = answer.core
    table['reply_version'][streams] = answer.version
    # The learner counts a version after it has published it, so ours may be ahead of its count.
    learner_version = max(int(self._learner_versions[policy]), answer.version)
    table['reply_learner_version'][streams] = learner_version
    table['reply_generation'][streams] = selection.generation
    table['reply_tick'][streams] = selection.tick
