"""The parameter buffer: no torn copy, whatever the writer does meanwhile."""

import multiprocessing
import time
from collections.abc import Callable

import numpy as np
import pytest

from sfjax.shm.blocks import SharedBlock
from sfjax.shm.params import ParameterBuffer
from sfjax.specs import array_spec

NBYTES = 400_000
FLAG = {'stop': array_spec(np.int64, 1)}

spawn = multiprocessing.get_context('spawn')


def params_of(version: int, nbytes: int = NBYTES) -> np.ndarray:
  """Parameters that are whole when all bytes are equal, and of `version` when they tell it."""
  return np.full(nbytes, version % 251, np.uint8)


def is_whole(data: np.ndarray, version: int) -> bool:
  return bool((data == version % 251).all())


def publish_without_pause(block: SharedBlock, flag: SharedBlock) -> None:
  buffer, stop = ParameterBuffer(block, num_policies=2, nbytes=NBYTES), flag.map(FLAG)['stop']
  version, deadline = 1, time.monotonic() + 30
  while not stop[0] and time.monotonic() < deadline:
    version += 1
    buffer.publish(1, version, params_of(version))


class SlowReader(ParameterBuffer):
  """Copies in two halves; `between` happens in the middle."""

  between: Callable[[], None]

  def _copy(self, policy: int, slot: int) -> tuple[np.ndarray, int]:
    data, version = np.empty_like(self._data[policy, slot]), int(self._versions[policy, slot])
    middle = len(data) // 2
    data[:middle] = self._data[policy, slot, :middle]
    self.between()
    data[middle:] = self._data[policy, slot, middle:]
    return data, version


class Interrupted(SlowReader):
  """The first copy is interrupted by `times` publications and the first half of another."""

  def interrupt(self, times: int) -> None:
    def publish() -> None:
      self.between = lambda: None
      version = self.count(0)
      for i in range(1, times + 1):
        self.publish(0, version + i, params_of(version + i, 10))
      self._data[0, (version + times + 1) % 3, -5:] = (version + times + 1) % 251

    self.between = publish


def interrupted_buffer(times: int) -> Interrupted:
  buffer = Interrupted(SharedBlock(), num_policies=1, nbytes=10, allocate=True)
  for version in (1, 2, 3, 4):
    buffer.publish(0, version, params_of(version, 10))
  buffer.interrupt(times)
  return buffer


@pytest.mark.parametrize('times', range(8))
def test_a_copy_that_the_writer_came_around_to_is_refused(times):
  """Catches a missing second look, and one that allows a publication too many."""
  published = interrupted_buffer(times).read(0)
  assert is_whole(published.data, published.version)
  data, version = interrupted_buffer(times)._copy(0, 4 % 3)
  assert is_whole(data, version) == (times < 2)  # So the test can fail.


def test_torn_copies_exist_and_none_is_accepted():
  """The same between processes: a writer that never pauses, a reader that sleeps at times."""
  block, flag, rng = SharedBlock(), SharedBlock(), np.random.default_rng(0)
  stop = flag.allocate(FLAG)['stop']
  buffer = SlowReader(block, num_policies=2, nbytes=NBYTES, allocate=True)
  buffer.between = lambda: time.sleep(0.001) if rng.random() < 0.3 else None
  buffer.publish(1, 1, params_of(1))
  process = spawn.Process(target=publish_without_pause, args=(block, flag), daemon=True)
  process.start()
  while buffer.count(1) < 10:
    time.sleep(0.01)
  torn, versions, deadline = 0, [], time.monotonic() + 20
  try:
    while torn < 20 or len(versions) < 300:  # Without a torn copy the test proves nothing.
      assert time.monotonic() < deadline, f'{torn} torn copies in {len(versions)}'
      torn += not is_whole(*buffer._copy(1, buffer.count(1) % 3))
      published = buffer.read(1)
      assert is_whole(published.data, published.version)
      versions.append(published.version)
  finally:
    stop[0] = 1
    process.join(10)
  assert versions == sorted(versions)


def test_an_older_or_equal_version_is_refused_and_the_newer_stays():
  """Catches a check that is skipped, or made against another slot or policy."""
  buffer = ParameterBuffer(SharedBlock(), num_policies=2, nbytes=10, allocate=True)
  buffer.publish(1, 1000, params_of(1000, 10))
  for version in (0, 3, 7, 8, 100):  # Versions jump at a resume and at an exchange.
    buffer.publish(0, version, params_of(version, 10))
    for old in (version, version - 1):
      with pytest.raises(ValueError, match=f'policy 0: version {old} was published before'):
        buffer.publish(0, old, params_of(old, 10))
    published = buffer.read(0)
    assert published.version == version and is_whole(published.data, published.version)
  assert buffer.read(1).version == 1000
  assert (buffer.count(0), buffer.count(1)) == (5, 1)


def test_parameters_that_were_never_published_are_not_read_as_zeros():
  buffer = ParameterBuffer(SharedBlock(), num_policies=1, nbytes=10, allocate=True)
  with pytest.raises(LookupError, match='policy 0 has no parameters yet'):
    buffer.read(0)


def test_a_copy_is_the_readers_own():
  """Catches a view of shared memory handed out: jax would read it while it changes."""
  buffer = ParameterBuffer(SharedBlock(), num_policies=1, nbytes=10, allocate=True)
  buffer.publish(0, 1, params_of(1, 10))
  published = buffer.read(0)
  for version in (2, 3, 4, 5):
    buffer.publish(0, version, params_of(version, 10))
  assert is_whole(published.data, 1)


def test_a_reader_that_is_always_overtaken_says_so():
  """Catches a wait without end."""
  buffer = Interrupted(SharedBlock(), num_policies=1, nbytes=10, allocate=True)
  buffer.publish(0, 1, params_of(1, 10))

  def publish_for_ever() -> None:
    for _ in range(3):
      buffer.publish(0, buffer.count(0) + 1, params_of(buffer.count(0) + 1, 10))

  buffer.between, start = publish_for_ever, time.monotonic()
  with pytest.raises(TimeoutError, match='policy 0: no whole copy'):
    buffer.read(0, timeout_s=0.05)
  assert time.monotonic() - start < 5
