"""Shared blocks: what a child sees of them, and what happens when memory is short."""

import errno
import multiprocessing
import os
import time
import zlib

import numpy as np
import pytest

from sfjax.shm import blocks
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.queues import RecordQueue
from sfjax.specs import ArraySpec, array_spec

SPECS = {
  'flags': array_spec(bool, 3),
  'empty': array_spec(np.float32, 5, 0),
  'data': array_spec(np.uint8, 4, 100_001),
  'read': array_spec(np.int64, 1),
}
WRITTEN = np.dtype([('serial', 'i4'), ('checksum', 'i8')])

spawn = multiprocessing.get_context('spawn')


def write_and_tell(block: SharedBlock, written: RecordQueue, count: int) -> None:
  arrays, rng, deadline = block.map(SPECS), np.random.default_rng(1), time.monotonic() + 20
  for serial in range(count):
    while arrays['read'][0] < serial - 3:
      assert time.monotonic() < deadline, 'the reader stopped'
      time.sleep(0)
    place = arrays['data'][serial % 4]
    place[:] = rng.integers(0, 256, len(place))
    written.put(serial, zlib.crc32(place.tobytes()))


def ask_for_too_much(limit: str, answer: RecordQueue) -> None:
  """Puts the number of the error that too large an allocation raises; 0 for none."""
  available, nbytes = 1 << 20, 1 << 21
  if limit == 'file system':  # One with a limit, which the memfd's has not.
    os.memfd_create = lambda _: os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR)
    size = os.statvfs('/dev/shm')
    available, nbytes = 1 << 62, size.f_blocks * size.f_frsize + 1
  blocks.available_memory = lambda: (available, 'of the test')
  try:
    SharedBlock().allocate({'data': array_spec(np.uint8, nbytes)})
    answer.put(0, 0)
  except OSError as error:
    answer.put(error.errno or 0, 0)


def test_a_child_sees_what_was_written_before_the_record_that_speaks_of_it():
  """Catches arrays that overlap or lie elsewhere in a child, and a record before its data."""
  block, written, count = SharedBlock(), RecordQueue(WRITTEN, 10), 200
  arrays = block.allocate(SPECS)
  arrays['flags'][:] = True
  process = spawn.Process(target=write_and_tell, args=(block, written, count), daemon=True)
  process.start()
  serial = -1
  while serial < count - 1:
    assert written.wait(10), 'the writer stopped'
    for serial, checksum in written.get_all().tolist():
      assert zlib.crc32(arrays['data'][serial % 4].tobytes()) == checksum
      arrays['read'][0] = serial + 1
  process.join(10)
  assert process.exitcode == 0
  assert arrays['flags'].all()


@pytest.mark.parametrize(
  ('limit', 'number'), (('file system', errno.ENOSPC), ('memory', errno.ENOMEM))
)
def test_too_large_a_block_raises_before_any_write(limit, number):
  """Catches a block that is sized but not reserved (SIGBUS later), and one beyond the memory."""
  answer = RecordQueue(WRITTEN, 1)
  process = spawn.Process(target=ask_for_too_much, args=(limit, answer), daemon=True)
  process.start()
  process.join(20)
  assert process.exitcode == 0
  assert answer.get_all().tolist() == [(number, 0)]


def test_arrays_of_different_writers_share_no_cache_line():
  specs: dict[str, ArraySpec] = {f'a{n}': array_spec(np.uint8, n) for n in (1, 63, 64, 65)}
  arrays = SharedBlock().allocate(specs)
  starts = [array.ctypes.data for array in arrays.values()]
  assert all(start % 64 == 0 for start in starts)
  assert all(a + len(x) <= b for a, x, b in zip(starts, arrays.values(), starts[1:], strict=False))


def test_a_block_gives_its_descriptors_back_and_its_arrays_stay_valid():
  """Catches the memory of a finished run held until the process ends."""
  before = len(os.listdir('/proc/self/fd'))
  block = SharedBlock()
  arrays = block.allocate(SPECS)
  del block
  arrays['data'][:] = 7
  assert (arrays['data'] == 7).all()
  del arrays
  assert len(os.listdir('/proc/self/fd')) == before
