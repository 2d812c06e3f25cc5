"""The batcher: copies complete rows of the slab into training batches and releases them at once.

Reads row numbers from the trajectory queue. A full batch goes to the learner; while the learner
trains on it the next one fills. Rows of a policy that does not train are released unread.
"""

import os
import select
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import Topology
from sfjax.specs import ArraySpec
from sfjax.staging import Buffer, Staging

Arrays = dict[str, np.ndarray]

TIME_FIELDS = (
  'actions',
  'behaviour_log_prob',
  'behaviour_value',
  'rewards',
  'terminated',
  'played',
  'version',
  'learner_version',
  'action_mask',
  'behaviour_params',
)


class ReadyBatch(NamedTuple):
  """A full batch of one policy."""

  policy: int
  buffer: Buffer  # Fields [devices, T+1 or T, B / devices, ...], `core` [devices, B / devices, C].
  rows: list[int]  # Of the slab, that are released only after the update.


def batch_specs(slab: Arrays, *, num_devices: int, trajectories: int) -> dict[str, ArraySpec]:
  """Returns the specs of a batch of `trajectories` rows over `num_devices` devices."""
  share = trajectories // num_devices
  specs = {}
  for name, array in slab.items():
    if name.startswith('obs/') or name in ('first', *TIME_FIELDS):
      shape = (num_devices, array.shape[1], share, *array.shape[2:])
    elif name == 'core':
      shape = (num_devices, share, *array.shape[1:])
    else:
      continue
    specs[name] = ArraySpec(shape, array.dtype)
  return specs


class Batcher:
  """Fills batches for every policy."""

  def __init__(
    self,
    *,
    topology: Topology,
    slab: Arrays,
    streams: Arrays,
    trajectories: RecordQueue,
    replies: list[RecordQueue],
    num_policies: int,
    num_devices: int,
    batch_trajectories: int,
    trains: bool = True,
    synchronous: bool = False,
  ) -> None:
    if batch_trajectories % num_devices:
      raise ValueError(
        f'{batch_trajectories} trajectories cannot be shared by {num_devices} devices; make '
        f'learner.batch_size a multiple of {topology.rollout * num_devices}'
      )
    self._topology, self._slab, self._streams = topology, slab, streams
    self._trajectories, self._replies = trajectories, replies
    self._share = batch_trajectories // num_devices
    self._size = batch_trajectories
    self._trains, self._synchronous = trains, synchronous
    specs = batch_specs(slab, num_devices=num_devices, trajectories=batch_trajectories)
    self.staging = [Staging(specs) for _ in range(num_policies)]
    self._filling: list[Buffer | None] = [None] * num_policies
    self._filled = [0] * num_policies
    self._unreleased: list[list[int]] = [[] for _ in range(num_policies)]
    self._pending: list[deque[int]] = [deque() for _ in range(num_policies)]
    self._accepted = slab['released'].copy()
    self.ready: deque[ReadyBatch] = deque()
    self.samples_discarded = [0] * num_policies
    self._wake_read, self._wake_write = os.pipe()
    for fd in (self._wake_read, self._wake_write):
      os.set_blocking(fd, False)
      weakref.finalize(self, os.close, fd)
    self._poll = select.poll()
    self._poll.register(self._wake_read, select.POLLIN)
    self._poll.register(trajectories.fileno(), select.POLLIN)

  def turn(self) -> bool:
    """Takes every complete row and copies what has room; returns whether anything was done."""
    records = self._trajectories.get_all()
    for record in records:
      self._accept(int(record['row']), int(record['serial']))
    progressed = bool(len(records))
    for policy, pending in enumerate(self._pending):
      while pending and self._has_room(policy):
        self._copy(policy, pending.popleft())
        progressed = True
    return progressed

  def wait(self, timeout_s: float) -> None:
    """Waits for a row, or for `wake`, at most `timeout_s` seconds."""
    self._poll.poll(timeout_s * 1000)
    try:
      os.read(self._wake_read, 4096)
    except BlockingIOError:
      return

  def wake(self) -> None:
    """Ends a `wait`: a batch was given back, so there may be room."""
    try:
      os.write(self._wake_write, b'.')
    except BlockingIOError:
      return  # Full of wake-ups that were not read yet.

  def give_back(self, batch: ReadyBatch, outputs: Any) -> None:
    """Takes a batch back whose last update, and the publication after it, have been made.

    Args:
      batch: as it came from `ready`.
      outputs: of the program that read it.
    """
    self.staging[batch.policy].lend(batch.buffer, outputs)
    for row in batch.rows:
      self._release(row)
    self.wake()

  def _accept(self, row: int, serial: int) -> None:
    if serial <= self._accepted[row]:
      return  # Repeated by a restarted worker.
    self._accepted[row] = serial
    policy = int(self._slab['policy'][row])
    stream = self._topology.stream_of_row(row)
    current = self._slab['generation'][row] == self._streams['generation'][stream]
    if self._trains and current:
      self._pending[policy].append(row)
      return
    self.samples_discarded[policy] += int(self._slab['played'][row].sum())
    self._release(row)

  def _has_room(self, policy: int) -> bool:
    if self._filling[policy] is None:
      self._filling[policy] = self.staging[policy].acquire()
    return self._filling[policy] is not None

  def _copy(self, policy: int, row: int) -> None:
    buffer = self._filling[policy]
    assert buffer is not None
    device, place = divmod(self._filled[policy], self._share)
    for name, array in buffer.items():
      if name == 'core':
        array[device, place] = self._slab[name][row]
      else:
        array[device, :, place] = self._slab[name][row]
    if self._synchronous:
      self._unreleased[policy].append(row)
    else:
      self._release(row)
    self._filled[policy] += 1
    if self._filled[policy] == self._size:
      self.ready.append(ReadyBatch(policy, buffer, self._unreleased[policy]))
      self._filling[policy], self._filled[policy], self._unreleased[policy] = None, 0, []

  def _release(self, row: int) -> None:
    self._slab['released'][row] = self._slab['queued'][row]
    worker = self._topology.worker_of_row(row)
    # The counter is what counts and the record a wake-up: one that finds the queue full is not
    # missed, for then others wait to be read.
    self._replies[worker].put(self._slab['generation'][row], -1, 0, 0)
