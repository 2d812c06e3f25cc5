"""Queues between processes: many writers, one reader, and writers that die."""

import itertools
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from sfjax.metrics.records import EPISODE, UPDATE
from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import REPLY, REQUEST, TRAJECTORY

RECORD = np.dtype([('writer', 'i4'), ('serial', 'i8'), ('check', 'i8')])
WIDE = np.dtype([('writer', 'i8')] + [(f'copy{i}', 'i8') for i in range(400)])  # 3208 bytes.

spawn = multiprocessing.get_context('spawn')


def check_of(writer: int, serial: int) -> int:
  return (serial * 2654435761 + writer) % (1 << 40)


def write_records(queue: RecordQueue, writer: int, count: int) -> None:
  deadline = time.monotonic() + 20  # A test that failed must not leave a busy process.
  for serial in range(count):
    while not queue.put(writer, serial, check_of(writer, serial)):
      if time.monotonic() > deadline:
        return
      time.sleep(0)


def write_wide_records(queue: RecordQueue, writer: int) -> None:
  deadline = time.monotonic() + 20
  while time.monotonic() < deadline:
    queue.put(*[writer] * len(WIDE.names or ()))


def test_a_lost_doubled_or_mixed_record_of_several_writers_is_seen():
  """Catches a write that is retried after it went through, records cut at a chunk or a page."""
  queue, count, writers = RecordQueue(RECORD, 100), 40_000, 3
  processes = [
    spawn.Process(target=write_records, args=(queue, writer, count), daemon=True)
    for writer in range(writers)
  ]
  for process in processes:
    process.start()
  rng, taken = np.random.default_rng(0), []
  while sum(map(len, taken)) < writers * count:
    assert queue.wait(10), 'the writers stopped'
    taken.append(queue.get_all())
    if rng.random() < 0.05:
      time.sleep(0.002)  # Lets the pipe run full.
  for process in processes:
    process.join(10)
  records = np.concatenate(taken)
  assert len(queue.get_all()) == 0
  for writer in range(writers):
    serials = records['serial'][records['writer'] == writer]
    np.testing.assert_array_equal(serials, np.arange(count))
  for writer, serial, check in records[:: len(records) // 1000]:
    assert check == check_of(int(writer), int(serial))


def test_a_killed_writer_leaves_no_lock_and_no_half_record():
  """Catches a queue behind a lock, and records that are not written in one piece."""
  queue = RecordQueue(WIDE, 20)
  processes = [
    spawn.Process(target=write_wide_records, args=(queue, writer), daemon=True) for writer in (1, 2)
  ]
  for process in processes:
    process.start()
  seen, killed = set(), False
  deadline = time.monotonic() + 20
  try:
    while seen != {2} or not killed:
      assert time.monotonic() < deadline, f'only records of {seen}'
      assert queue.wait(10)
      records = queue.get_all()
      values = records.view(np.int64).reshape(len(records), -1)
      assert (values == values[:, :1]).all(), 'a record of two writers'
      seen = seen | set(values[:, 0].tolist()) if not killed else set(values[:, 0].tolist())
      if seen == {1, 2} and not killed:
        os.kill(processes[0].pid or 0, signal.SIGKILL)
        processes[0].join(10)
        queue.get_all()
        seen, killed = set(), True
  finally:
    for process in processes:
      process.kill()
      process.join(10)


def test_a_full_queue_refuses_and_works_on():
  """Catches a put that blocks or raises when full, and one that breaks the records before it."""
  queue, counts = RecordQueue(RECORD, 10), []

  def fill() -> None:
    serials = itertools.count()
    counts.append(next(serial for serial in serials if not queue.put(0, serial, 7)))
    assert not queue.put(0, 0, 0)

  thread = threading.Thread(target=fill, daemon=True)
  thread.start()
  thread.join(5)
  assert not thread.is_alive(), 'put waits'
  np.testing.assert_array_equal(queue.get_all()['serial'], np.arange(counts[0]))
  assert queue.put(1, 2, 3)
  assert queue.get_all().tolist() == [(1, 2, 3)]


@pytest.mark.parametrize('dtype', (REQUEST, REPLY, TRAJECTORY, EPISODE, UPDATE, WIDE))
def test_a_queue_that_promises_more_than_it_holds_is_refused(dtype):
  """Catches a capacity counted in bytes: records do not span pages, so some bytes stay empty."""
  names = dtype.names or ()
  capacity = made = (1 << 20) // dtype.itemsize
  queue = None
  while queue is None:
    try:
      queue, made = RecordQueue(dtype, capacity), capacity
    except ValueError:
      capacity -= 1
  assert made >= 0.9 * ((1 << 20) // (4096 // (4096 // dtype.itemsize)))
  assert all(queue.put(*[0] * len(names)) for _ in range(made))


def test_a_record_larger_than_an_atomic_write_is_refused():
  with pytest.raises(ValueError, match='records of at most 4096'):
    RecordQueue(np.dtype([(f'f{i}', 'i8') for i in range(513)]), 1)


def test_waiting_ends_with_a_record_or_the_timeout():
  """Catches seconds taken for milliseconds."""
  queue = RecordQueue(RECORD, 10)
  start = time.monotonic()
  assert not queue.wait(0.05)
  assert 0.04 < time.monotonic() - start < 1
  queue.put(0, 0, 0)
  assert queue.wait(5)


def test_descriptors_go_with_their_queue():
  """Catches two descriptors left open by each queue of each run in one process."""
  queue = RecordQueue(RECORD, 10)
  fd = queue.fileno()
  os.fstat(fd)
  del queue
  with pytest.raises(OSError, match='Bad file descriptor'):
    os.fstat(fd)
