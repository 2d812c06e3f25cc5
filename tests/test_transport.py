"""The whole way of the data in one process, under random sizes, interleavings and deaths."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sfjax.actors.worker import Worker
from sfjax.inference.server import Arrays
from sfjax.learner.batcher import Batcher, ReadyBatch
from tests.fakes import (
  BOTH,
  TERMINATED,
  TRUNCATED,
  FakeEnv,
  FakeOutput,
  FakePolicies,
  assert_rows,
  expected_rows,
  make_server,
  make_split,
  make_timer,
  make_transport,
  only_writable,
)


class Sizes(NamedTuple):
  """What a run may be made of."""

  envs: tuple[int, ...]  # Of each worker.
  splits: int
  policies: int
  rollout: int
  rows: int
  devices: int
  share: int

  @property
  def workers(self) -> int:
    return len(self.envs)


SIZES = st.builds(
  Sizes,
  envs=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
  splits=st.integers(1, 3),
  policies=st.integers(1, 2),
  rollout=st.integers(1, 5),
  rows=st.integers(1, 3),
  devices=st.integers(1, 2),
  share=st.integers(1, 4),
)


class Died(Exception):
  """The end of a worker, wherever it was."""


class Fuse:
  """Kills a worker after a number of things it did."""

  def __init__(self) -> None:
    self.left: int | None = None

  def burn(self) -> None:
    if self.left is not None:
      self.left -= 1
      if self.left < 0:
        raise Died


class MortalEnv(FakeEnv):
  """An environment that may kill its worker."""

  fuse: Fuse

  def reset(self, *, seed: int) -> Any:
    self.fuse.burn()
    return super().reset(seed=seed)

  def step(self, action: int) -> Any:
    self.fuse.burn()
    return super().step(action)


class MortalQueue:
  """The end of a queue at which a worker may die before and after it puts."""

  def __init__(self, queue: Any, fuse: Fuse, note: Any = lambda *_: None) -> None:
    self._queue, self._fuse, self._note = queue, fuse, note

  def put(self, *values: int) -> bool:
    self._note(*values)
    self._fuse.burn()
    put = self._queue.put(*values)
    self._fuse.burn()
    return put


class World:
  """A run of which one turn of one part happens at a time."""

  def __init__(self, sizes: Sizes, rng: np.random.Generator) -> None:
    self.sizes, self.rng = sizes, rng
    self.transport = make_transport(
      envs=sizes.envs,
      splits=sizes.splits,
      rows=sizes.rows,
      rollout=sizes.rollout,
    )
    self.topology = self.transport.topology
    policies = FakePolicies(self.topology)
    policies.during_act = self._while_the_server_acts
    self.server = make_server(self.transport, policies, num_policies=sizes.policies)
    self.batcher = Batcher(
      topology=self.topology,
      slab=only_writable(self.transport.slab, 'released'),
      streams=only_writable(self.transport.streams),
      trajectories=self.transport.trajectories,
      replies=self.transport.replies,
      num_policies=sizes.policies,
      num_devices=sizes.devices,
      batch_trajectories=sizes.devices * sizes.share,
    )
    self.workers: list[Worker | None] = [None] * sizes.workers
    self.generations = [-1] * sizes.workers
    self.fuses = [Fuse() for _ in range(sizes.workers)]
    self.envs: dict[tuple[int, int], MortalEnv] = {}  # By stream and generation, as all below.
    self.queued: Counter[tuple[int, int]] = Counter()
    self.batched: dict[tuple[int, int], list[Arrays]] = defaultdict(list)
    self._known: set[tuple[int, int]] = set()  # Row and serial of what was queued.
    self._reading: list[tuple[FakeOutput, ReadyBatch, Arrays]] = []

  def turn_worker(self, index: int) -> None:
    """A turn of a living worker, or the start of one in place of a dead one."""
    try:
      worker = self.workers[index]
      if worker is None:
        self._start_worker(index)
      else:
        worker.turn()
    except Died:
      self.workers[index] = None

  def turn_learner(self) -> None:
    """Takes a batch and starts a program on it."""
    if self.batcher.ready:
      batch, output = self.batcher.ready.popleft(), FakeOutput()
      count = self.topology.num_streams
      self._take(batch.policy, batch.buffer, self.sizes.devices * self.sizes.share, count)
      copy = {name: array.copy() for name, array in batch.buffer.items()}
      self._reading.append((output, batch, copy))
      self.batcher.staging[batch.policy].lend(batch.buffer, output)

  def finish_program(self) -> None:
    """Ends the oldest program, which read its buffer until now."""
    if self._reading:
      output, batch, copy = self._reading.pop(0)
      for name, array in copy.items():
        np.testing.assert_array_equal(batch.buffer[name], array, name)
      output.ready = True

  def any_turn(self, deaths: bool) -> None:
    """A turn of somebody."""
    part = int(self.rng.integers(-5, self.sizes.workers))
    if part >= 0:
      if deaths and self.rng.random() < 0.05:
        self.fuses[part].left = int(self.rng.integers(0, 30))
      self.turn_worker(part)
    elif part == -1:
      self.turn_learner()
    elif part == -2:
      self.finish_program()
    elif part == -3:
      self.batcher.turn()
    else:
      self.server.turn()

  def all_turns(self) -> None:
    """A turn of everybody, and nobody dies any more."""
    for index, fuse in enumerate(self.fuses):
      fuse.left = None
      self.turn_worker(index)
    self.server.turn()
    self.finish_turns()

  def finish_turns(self) -> None:
    self.batcher.turn()
    self.turn_learner()
    self.finish_program()

  def samples_of(self, key: tuple[int, int]) -> int:
    return sum(len(episode.actions) for episode in self.envs[key].episodes)

  def newest(self) -> list[tuple[int, int]]:
    return [
      (stream, self.generations[worker])
      for worker in range(self.sizes.workers)
      for split in self.topology.splits_of(worker)
      for stream in range(self.topology.num_streams)[self.topology.streams_of(worker, split)]
    ]

  def take_unfinished_batches(self) -> None:
    """Reads the rows of batches that are not full."""
    for policy in range(self.sizes.policies):
      buffer = self.batcher._filling[policy]
      if buffer is not None:
        self._take(policy, buffer, self.batcher._filled[policy], self.topology.num_streams)

  def _while_the_server_acts(self) -> None:
    if self.rng.random() < 0.3:
      self.turn_worker(int(self.rng.integers(self.sizes.workers)))

  def _start_worker(self, index: int) -> None:
    self.generations[index] += 1
    generation, fuse = self.generations[index], self.fuses[index]
    fuse.left = None if fuse.left is None or fuse.left < 0 else fuse.left
    mortal = self.transport._replace(
      requests=MortalQueue(self.transport.requests, fuse),
      trajectories=MortalQueue(self.transport.trajectories, fuse, self._note_row),
    )
    splits = []
    for split in self.topology.splits_of(index):
      part = self.topology.streams_of(index, split)
      envs = []
      for stream in range(part.start, part.stop):
        same_array = bool(self.rng.random() < 0.5)
        env = MortalEnv(stream, self._script(), generation=generation, same_array=same_array)
        env.fuse = fuse
        self.envs[stream, generation] = env
        envs.append(env)
      splits.append(
        make_split(
          mortal,
          envs,
          worker=index,
          index=split,
          generation=generation,
          num_policies=self.sizes.policies,
        )
      )
    worker = Worker(
      generation=generation,
      splits=splits,
      replies=self.transport.replies[index],
      timer=make_timer(self.transport),
    )
    worker.start()
    self.workers[index] = worker

  def _script(self) -> Iterator[tuple[int, str]]:
    rng = np.random.default_rng(self.rng.integers(1 << 32))
    rollout = self.sizes.rollout
    while True:
      length = rng.choice((1, max(rollout - 1, 1), rollout, rollout + 1, 2 * rollout + 1))
      yield int(length), str(rng.choice((TERMINATED, TRUNCATED, BOTH)))

  def _note_row(self, row: int, serial: int) -> None:
    if (row, serial) not in self._known:
      self._known.add((row, serial))
      generation = int(self.transport.slab['generation'][row])
      self.queued[self.topology.stream_of_row(row), generation] += 1

  def _take(self, policy: int, buffer: Arrays, rows: int, num_streams: int) -> None:
    """Notes the first `rows` rows of a batch."""
    for i in range(rows):
      device, place = divmod(i, self.sizes.share)
      row = {
        name: array[device, place].copy() if name == 'core' else array[device, :, place].copy()
        for name, array in buffer.items()
      }
      stream, generation, _ = row['obs/obs'][0].astype(int).tolist()
      assert stream < num_streams
      assert stream % self.sizes.policies == policy
      self.batched[stream, generation].append(row)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**32 - 1), deaths=st.booleans())
def test_any_interleaving_batches_every_played_sample_once_and_in_order(sizes, seed, deaths):
  """Catches deadlocks, rows of two writers, lost, doubled, reordered and mixed-up samples.

  Every part may write only the arrays that are its own (the others are read-only to it); workers
  die at any reset, step or put, and another takes their place some turns later.
  """
  world = World(sizes, np.random.default_rng(seed))
  for _ in range(250):
    world.any_turn(deaths)

  for index in range(sizes.workers):
    world.fuses[index].left = None
    world.turn_worker(index)
  before = {key: world.samples_of(key) for key in world.newest()}
  for _ in range((20 + 2 * world.topology.num_streams) * (sizes.rollout + 2)):
    world.all_turns()
  goal = sizes.rollout + 2
  assert all(world.samples_of(key) >= samples + goal for key, samples in before.items()), 'stalled'

  # The workers rest: everything that is complete must come through.
  for _ in range(2 * world.topology.num_rows + 2):
    world.finish_turns()
  world.take_unfinished_batches()
  discarded = 0
  for key, env in world.envs.items():
    expected, batched = expected_rows(env.episodes, sizes.rollout), world.batched[key]
    assert_rows(batched, expected, learner_ahead=0)
    assert len(batched) <= world.queued[key] <= len(expected)
    if key in before:
      assert len(batched) == world.queued[key] == len(expected)
    for row in expected[len(batched) : world.queued[key]]:
      discarded += sum(slot.action is not None for slot in row[:-1])
  assert discarded == sum(world.batcher.samples_discarded)
