"""The batcher: which rows make a batch, and when rows and buffers may be written again."""

import time

import numpy as np
import pytest

from sfjax.learner.batcher import TIME_FIELDS, Batcher, ReadyBatch
from sfjax.shm.queues import RecordQueue
from tests.fakes import FakeOutput, Transport, make_transport, only_writable


def filled_transport(*, workers: int = 2, num_policies: int = 1) -> Transport:
  """Rows of two a stream in which no two facts are equal."""
  transport = make_transport(workers=workers, envs=4, rows=2, rollout=3)
  for number, (name, array) in enumerate(transport.slab.items()):
    if name not in ('queued', 'released', 'generation', 'policy'):
      values = np.arange(array.size).reshape(array.shape) + 7 * number
      array[...] = values % 3 == 0 if array.dtype == bool else values
  transport.slab['policy'][:] = np.arange(transport.topology.num_rows) // 2 % num_policies
  return transport


def make_batcher(
  transport: Transport,
  *,
  num_policies: int = 1,
  num_devices: int = 1,
  trajectories: int = 4,
  trains: bool = True,
) -> Batcher:
  return Batcher(
    topology=transport.topology,
    slab=only_writable(transport.slab, 'released'),
    streams=only_writable(transport.streams),
    trajectories=transport.trajectories,
    replies=transport.replies,
    num_policies=num_policies,
    num_devices=num_devices,
    batch_trajectories=trajectories,
    trains=trains,
  )


def queue(transport: Transport, *rows: int) -> None:
  for row in rows:
    transport.slab['queued'][row] += 1
    transport.trajectories.put(row, transport.slab['queued'][row])


def released(transport: Transport) -> list[int]:
  """Rows that were released since they were last queued."""
  slab = transport.slab
  return np.flatnonzero((slab['released'] == slab['queued']) & (slab['queued'] > 0)).tolist()


def facts(transport: Transport, row: int) -> dict[str, np.ndarray]:
  names = ('obs/obs', 'first', *TIME_FIELDS, 'core')
  return {name: transport.slab[name][row].copy() for name in names if name in transport.slab}


def check_batch(batch: ReadyBatch, expected: list[dict[str, np.ndarray]], num_devices: int) -> None:
  """Checks all fields of a batch of `expected` rows, which go to device after device."""
  share = len(expected) // num_devices
  for name, array in batch.buffer.items():
    assert array.shape[0] == num_devices
    for i, row in enumerate(expected):
      device, place = divmod(i, share)
      part = array[device, place] if name == 'core' else array[device, :, place]
      np.testing.assert_array_equal(part, row[name], name)
  assert batch.buffer.keys() == expected[0].keys()


@pytest.mark.parametrize('num_devices', (1, 2, 4))
def test_batches_hold_the_rows_in_order_of_arrival(num_devices):
  """Catches a row in a wrong column, a field of another row, a device's share that is mixed."""
  transport = filled_transport()
  batcher = make_batcher(transport, num_devices=num_devices)
  order = [9, 2, 4, 15, 0, 7, 1, 3]
  expected = [facts(transport, row) for row in order]
  queue(transport, *order[:3])
  assert batcher.turn()
  assert not batcher.ready
  queue(transport, *order[3:])
  batcher.turn()
  first, second = batcher.ready
  check_batch(first, expected[:4], num_devices)
  check_batch(second, expected[4:], num_devices)
  assert (first.policy, second.policy) == (0, 0)


def test_a_row_is_released_when_it_was_copied_and_not_before():
  """Catches a release on arrival, a release only with the whole batch, a wrong worker told."""
  transport = filled_transport()
  batcher = make_batcher(transport, trajectories=2)
  queue(transport, 9)
  batcher.turn()
  assert released(transport) == [9]
  assert [len(replies.get_all()) for replies in transport.replies] == [0, 1]
  queue(transport, 0, 1, 2, 3, 4)
  batcher.turn()
  # Two batches of two are full and nobody took them: there is no place for rows 3 and 4.
  assert released(transport) == [0, 1, 2, 9]
  records = transport.replies[0].get_all()
  assert records[['generation', 'split']].tolist() == [(0, -1)] * 3
  transport.slab['rewards'][3] = 77  # Its worker still owns it, so what it says last counts.
  first, second = batcher.ready
  batcher.staging[0].lend(first.buffer, ())
  assert batcher.turn()
  assert released(transport) == [0, 1, 2, 3, 4, 9]
  np.testing.assert_array_equal(batcher.ready[2].buffer['rewards'][0, :, 0], 77)
  assert not batcher.turn()


def test_no_row_is_written_over_while_it_is_copied(monkeypatch):
  """Catches a release before the copy: a fast worker would write into what is being read."""
  transport = filled_transport()
  batcher = make_batcher(transport, trajectories=1)
  expected = facts(transport, 5)
  put = RecordQueue.put

  def worker_wakes(replies: RecordQueue, *values: int) -> bool:
    if replies is transport.replies[0]:
      for name in expected:
        transport.slab[name][5] = 99
    return put(replies, *values)

  monkeypatch.setattr(RecordQueue, 'put', worker_wakes)
  queue(transport, 5)
  batcher.turn()
  check_batch(batcher.ready[0], [expected], 1)


def test_repeated_records_of_a_row_count_once():
  """Catches a row trained on twice after a restart, before or after it was copied."""
  transport = filled_transport()
  batcher = make_batcher(transport, trajectories=2)
  queue(transport, 3)
  transport.trajectories.put(3, 1)
  batcher.turn()
  transport.trajectories.put(3, 1)
  batcher.turn()
  assert not batcher.ready
  queue(transport, 3)  # The next time it is complete, it counts again.
  batcher.turn()
  assert len(batcher.ready) == 1
  assert transport.slab['released'][3] == 2


def test_a_batcher_that_starts_late_repeats_no_row():
  transport = filled_transport()
  transport.slab['queued'][:] = transport.slab['released'][:] = 5
  batcher = make_batcher(transport, trajectories=1)
  transport.trajectories.put(3, 5)
  batcher.turn()
  assert not batcher.ready


def test_rows_of_a_generation_before_are_released_unread_and_counted():
  """Catches training on what a dead worker left, and rows that are discarded and kept."""
  transport = filled_transport(num_policies=2)
  batcher = make_batcher(transport, num_policies=2, trajectories=1)
  transport.streams['generation'][2:4] = 1
  transport.slab['generation'][6:8] = 1
  queue(transport, 4, 6, 0, 7)
  batcher.turn()
  assert released(transport) == [0, 4, 6, 7]
  played = transport.slab['played']
  assert batcher.samples_discarded == [int(played[4].sum()), 0]
  assert batcher.samples_discarded != [0, 0]
  assert [batch.policy for batch in batcher.ready] == [0, 1, 1]
  for batch, row in zip(batcher.ready, (0, 6, 7), strict=True):
    check_batch(batch, [facts(transport, row)], 1)


def test_without_training_every_row_is_released():
  transport = filled_transport()
  batcher = make_batcher(transport, trains=False)
  queue(transport, *range(16))
  batcher.turn()
  assert released(transport) == list(range(16))
  assert not batcher.ready
  assert batcher.samples_discarded == [int(transport.slab['played'].sum())]


def test_a_policy_without_room_does_not_stop_another():
  """Catches one list of pending rows for all, and reading that stops when one policy is full."""
  transport = filled_transport(num_policies=2)
  batcher = make_batcher(transport, num_policies=2, trajectories=1)
  queue(transport, 0, 1, 4, 5)  # Policy 0: two more than there is room for.
  queue(transport, 2, 3)
  batcher.turn()
  assert [batch.policy for batch in batcher.ready] == [0, 0, 1, 1]
  assert released(transport) == [0, 1, 2, 3]
  batcher.staging[1].lend(batcher.ready[2].buffer, ())
  queue(transport, 6)
  batcher.turn()
  check_batch(batcher.ready[4], [facts(transport, 6)], 1)
  assert released(transport) == [0, 1, 2, 3, 6]


def test_a_buffer_is_not_written_while_a_program_reads_it():
  """Catches a buffer reused when it was given back, and not when the output is ready."""
  transport = filled_transport()
  batcher = make_batcher(transport, trajectories=2)
  queue(transport, *range(8))
  batcher.turn()
  batches = list(batcher.ready)
  outputs = [FakeOutput(), FakeOutput()]
  for batch, output in zip(batches, outputs, strict=True):
    batcher.staging[0].lend(batch.buffer, {'loss': output, 'done': FakeOutput(ready=True)})
  for i, output in enumerate(outputs):
    assert not batcher.turn()
    check_batch(batches[i], [facts(transport, row) for row in (2 * i, 2 * i + 1)], 1)
    output.ready = True
    assert batcher.turn()
    check_batch(batcher.ready[2 + i], [facts(transport, row) for row in (2 * i + 4, 2 * i + 5)], 1)


def test_batches_that_do_not_divide_among_the_devices_are_refused():
  """Catches a row for a device that does not exist."""
  with pytest.raises(ValueError, match='make learner.batch_size a multiple of 12'):
    make_batcher(filled_transport(), num_devices=4, trajectories=6)


def test_waiting_ends_with_a_row_or_a_wake_up():
  """Catches a learner that gives a buffer back unheard, and a wake-up that is never used up."""
  transport = filled_transport()
  batcher = make_batcher(transport)

  def waited() -> bool:
    start = time.monotonic()
    batcher.wait(0.2)
    return time.monotonic() - start > 0.19

  assert waited()
  for _ in range(70_000):
    batcher.wake()  # More than the pipe holds.
  while not waited():
    pass
  batcher.wake()
  assert not waited()
  assert waited()
  queue(transport, 0)
  assert not waited()
