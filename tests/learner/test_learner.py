"""The learner's loop: what it publishes, counts, keeps and gives back."""

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.learner.batcher import Batcher
from sfjax.learner.devices import first_replica, replicate
from sfjax.learner.learner import MAX_NON_FINITE, Learner, NonFiniteError
from sfjax.learner.minibatches import Prepare, ShuffledUpdate
from sfjax.learner.schedules import SCHEDULES
from sfjax.learner.setup import Saver, compiled_update, initial_states
from sfjax.learner.update import make_hyperparams
from sfjax.metrics.records import LAG_METRICS, UPDATE, UPDATE_METRICS
from sfjax.metrics.stages import Stage, StageTimer, status_specs
from sfjax.models.flat_params import flat_nbytes, flatten_params
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.params import ParameterBuffer
from sfjax.shm.queues import RecordQueue
from tests.fakes import CORE_SIZE, ENV, make_transport, zeros

T, B = 4, 4  # Steps in a row, rows in a batch; two of them for each device.
FRAMESKIP = 3
POLICIES = 2


def make_config() -> config_lib.Config:
  config = config_lib.Config()
  config.model.encoder, config.model.mlp_layers = config_lib.Encoder.MLP, (4,)
  config.model.core_size = CORE_SIZE
  config.learner.rollout, config.learner.batch_size = T, T * B
  config.learner.max_policy_lag = 5
  config.learner.learning_rate = 1e-3
  config.train.num_policies = POLICIES
  return config


@pytest.fixture(scope='module')
def update() -> ShuffledUpdate:
  return compiled_update(make_config(), ENV)[0]


@functools.cache
def prepare() -> Prepare | None:
  config = make_config()
  config.learner.epochs = 2
  return compiled_update(config, ENV)[1]


@functools.cache
def fresh_states() -> list[Any]:
  return jax.tree.map(np.array, initial_states(make_config(), ENV))


class World:
  """A learner with its batcher, two policies, and everything around them in this process."""

  def __init__(
    self,
    update: ShuffledUpdate,
    workdir: Path,
    *,
    epochs=1,
    max_frames=10**9,
    schedule=SCHEDULES['constant'],
  ) -> None:
    config = make_config()
    self.transport = make_transport(envs=16, rows=2, rollout=T)
    # Rows of the slab belong to the policies in halves.
    self.transport.slab['policy'][:] = np.arange(32) // 16
    self.status = zeros(status_specs(self.transport.topology, POLICIES))
    self.states: Any = [replicate(state) for state in fresh_states()]
    self.batcher = Batcher(
      topology=self.transport.topology,
      slab=self.transport.slab,
      streams=self.transport.streams,
      trajectories=self.transport.trajectories,
      replies=self.transport.replies,
      num_policies=POLICIES,
      num_devices=2,
      batch_trajectories=B,
    )
    nbytes = flat_nbytes(first_replica(self.states[0]).params)
    self.params = ParameterBuffer(
      SharedBlock(), num_policies=POLICIES, nbytes=nbytes, allocate=True
    )
    self.updates = RecordQueue(UPDATE, 64)
    self.learner = Learner(
      update=update,
      prepare=prepare() if epochs > 1 else None,
      states=self.states,
      hyperparams=[make_hyperparams(config)] * POLICIES,
      schedule=functools.partial(schedule, total_frames=1000, end=0.0),
      epochs=epochs,
      minibatches=1,
      max_kl=None,
      seed=0,
      frameskip=FRAMESKIP,
      max_frames=max_frames,
      batcher=self.batcher,
      params=self.params,
      requests=self.transport.requests,
      updates=self.updates,
      status=self.status,
      timer=StageTimer(self.status, self.transport.topology.num_workers + 1),
      workdir=workdir,
    )
    self._rng = np.random.default_rng(0)
    self._next = [0] * POLICIES

  def queue_batch(self, policy=0, *, played=T * B, stale=0, reward=0.0, version=None) -> None:
    """Completes B rows of a policy: so many slots played, the first few of them stale."""
    slab = self.transport.slab
    flat_played, flat_stale = np.arange(T * B) < played, np.arange(T * B) < stale
    present = int(self.status['version'][policy]) if version is None else version
    for i in range(B):
      row = 16 * policy + self._next[policy] % 16
      self._next[policy] += 1
      slots = slice(i * T, (i + 1) * T)
      slab['obs/obs'][row] = self._rng.normal(size=(T + 1, 3))
      slab['actions'][row, :, 0] = self._rng.integers(0, 4, T)
      slab['behaviour_log_prob'][row] = -1.4
      slab['rewards'][row] = self._rng.normal(size=T) + reward
      slab['played'][row] = flat_played[slots]
      slab['version'][row] = np.where(flat_stale[slots], present - 6, present)
      slab['learner_version'][row] = present
      slab['queued'][row] += 1
      self.transport.trajectories.put(row, slab['queued'][row])

  def train(self, policy=0, **batch: Any) -> None:
    """Trains on one batch."""
    self.queue_batch(policy, **batch)
    self.batcher.turn()
    assert self.learner.turn()

  def params_bytes(self, policy=0) -> bytes:
    return flatten_params(first_replica(self.learner.states[policy]).params).tobytes()

  def counters(self, policy=0) -> tuple[int, int, int]:
    names = ('samples', 'frames', 'samples_dropped')
    samples, frames, dropped = (int(self.status[name][policy]) for name in names)
    return samples, frames, dropped


@pytest.fixture
def world(update, tmp_path) -> World:
  return World(update, tmp_path)


@pytest.mark.parametrize('epochs', (1, 3))
def test_every_update_is_published_once_under_the_next_version(update, tmp_path, epochs):
  """Catches a version that is skipped or repeated, old parameters, another policy's, no wake-up."""
  world = World(update, tmp_path, epochs=epochs)
  assert not world.learner.turn()
  for policy in (0, 1):
    world.learner.publish(policy)
  before = world.transport.requests.get_all()
  assert before[['policy', 'tick']].tolist() == [(-1, 0), (-1, 0)]
  expected = [0, 0]
  for policy in (0, 1, 1):
    other = world.params.read(1 - policy)
    world.train(policy)
    versions = [expected[policy] + i + 1 for i in range(epochs)]
    expected[policy] += epochs
    wake_ups = world.transport.requests.get_all()
    assert wake_ups['policy'].tolist() == [-1] * epochs
    assert wake_ups['tick'].tolist() == versions
    records = world.updates.get_all()
    assert records[['policy', 'version']].tolist() == [(policy, v) for v in versions]
    assert all(np.isfinite(records[name]).all() for name in UPDATE_METRICS)
    for name in LAG_METRICS:
      assert records[name].tolist() == [0] * epochs, 'our own epochs do not count'
    published = world.params.read(policy)
    assert published.version == versions[-1] == world.status['version'][policy]
    assert published.data.tobytes() == world.params_bytes(policy)
    unchanged = world.params.read(1 - policy)
    assert unchanged.version == other.version
    np.testing.assert_array_equal(unchanged.data, other.data)
  assert world.params.count(0) == epochs + 1


def test_a_schedule_counts_the_frames_of_all_starts(update, tmp_path, compilations):
  """Catches a rate that starts again after a resume, counts updates, or compiles anew."""
  world = World(update, tmp_path, schedule=SCHEDULES['linear'])
  world.train()
  compiled = len(compilations)
  world.status['frames'][:] = 250, 900  # As a checkpoint has them.
  for policy in (0, 1):
    world.train(policy)
  rates = world.updates.get_all()['learning_rate']
  np.testing.assert_allclose(rates, [1e-3, 0.75e-3, 0.1e-3], rtol=1e-6)
  assert len(compilations) == compiled


@pytest.mark.parametrize('epochs', (1, 2))
def test_a_batch_is_counted_once(update, tmp_path, epochs):
  """Catches frames for each epoch, for stale or unplayed slots, and without the frameskip."""
  world = World(update, tmp_path, epochs=epochs)
  world.train(played=13, stale=2)
  assert world.counters() == (11, 33, 2)
  world.train(played=16)
  assert world.counters() == (27, 81, 2)
  world.train(1, played=3, stale=1)
  assert (world.counters(), world.counters(1)) == ((27, 81, 2), (2, 6, 1))
  world.train(played=5, stale=5)  # Nothing to train on: all of it is dropped.
  assert world.counters() == (27, 81, 7)


def test_samples_that_the_batcher_discarded_are_dropped_ones(world):
  """Catches discarded rows that are never told, or told with every batch."""
  world.queue_batch(played=7)
  world.transport.slab['generation'][:4] = -1  # The rows are of a dead worker.
  world.batcher.turn()
  assert not world.learner.turn()
  world.train()
  world.train()
  assert world.counters() == (32, 96, 7)


def test_an_empty_batch_publishes_nothing(world):
  """Catches the same version published again, which the buffer refuses."""
  world.learner.publish(0)
  world.train(played=4, stale=4)
  assert world.params.count(0) == 1
  assert len(world.updates.get_all()) == 0
  world.train()
  assert world.status['version'][0] == 1


def test_a_non_finite_batch_is_kept_on_disk_and_changes_nothing(update, tmp_path, capfd):
  """Catches parameters lost to a NaN, and a report without the batch that made it."""
  world = World(update, tmp_path, epochs=2)
  world.train()
  before, counters = world.params_bytes(), world.counters()
  world.queue_batch(reward=np.nan)
  expected = world.transport.slab['rewards'][4:8].copy()
  obs = world.transport.slab['obs/obs'][4:8].copy()
  world.batcher.turn()
  world.learner.turn()
  assert world.params_bytes() == before
  assert world.status['version'][0] == 2
  samples, frames, dropped = counters
  assert world.counters() == (samples, frames, dropped + 16)
  (path,) = tmp_path.glob('*.npz')  # One batch, whatever `epochs`.
  assert str(path) in capfd.readouterr().out
  with np.load(path) as kept:
    # Rows go to device after device: [device, T, place].
    np.testing.assert_array_equal(kept['rewards'].transpose(0, 2, 1).reshape(B, T), expected)
    in_rows = kept['obs.obs'].transpose(0, 2, 1, 3).reshape(obs.shape)
    np.testing.assert_array_equal(in_rows, obs)
  world.train()
  assert world.status['version'][0] == 4


def test_only_non_finite_batches_in_a_row_end_the_run(update, tmp_path):
  """Catches a count that is never reset, is shared by policies, or counts epochs."""
  world = World(update, tmp_path, epochs=2)
  for _ in range(MAX_NON_FINITE - 1):
    world.train(reward=np.inf)
  world.train()
  for _ in range(MAX_NON_FINITE - 1):
    world.train(reward=np.inf)
    world.train(1, reward=np.inf)
  assert len(list(tmp_path.glob('*.npz'))) == 2 * (MAX_NON_FINITE - 1)
  with pytest.raises(NonFiniteError, match='policy 0: 3 updates .* learner.learning_rate 0.001'):
    world.train(reward=np.inf)


def test_a_disk_that_is_full_does_not_end_the_run(update, tmp_path, capfd):
  """Catches a non-finite batch whose file cannot be written as the end of everything."""
  world = World(update, tmp_path / 'missing')
  world.train(reward=np.nan)
  assert 'not written' in capfd.readouterr().out
  world.train()
  assert world.status['version'][0] == 1


def test_no_update_after_max_frames(update, tmp_path):
  """Catches a policy that trains on, one that stops another, and buffers not given back."""
  world = World(update, tmp_path, max_frames=90)
  for _ in range(2):
    world.train()
  assert world.counters() == (32, 96, 0)  # The batch that reaches the limit still counts.
  for _ in range(4):
    world.train(played=10)
  assert world.counters() == (32, 96, 0)
  assert world.status['version'].tolist() == [2, 0]
  world.train(1)
  assert world.status['version'].tolist() == [2, 1]


def test_buffers_are_written_again_only_after_their_update(world, monkeypatch):
  """Catches a batch that is given back without the outputs of its update, or never."""
  lent = []
  for staging in world.batcher.staging:
    monkeypatch.setattr(staging, 'lend', lambda buffer, outputs: lent.append((buffer, outputs)))
  world.queue_batch()
  world.batcher.turn()
  buffer = world.batcher.ready[0].buffer
  world.learner.turn()
  ((given_back, outputs),) = lent
  assert given_back is buffer
  assert jax.tree.leaves(outputs) and all(leaf.is_ready() for leaf in jax.tree.leaves(outputs))


def test_compiling_changes_nothing_and_leaves_nothing_to_compile(world, compilations):
  """Catches a warm-up that trains, and one with other shapes or types than a real batch."""
  before = [world.params_bytes(policy) for policy in range(POLICIES)]
  world.queue_batch()
  world.batcher.turn()
  batch = {name: np.zeros_like(array) for name, array in world.batcher.ready[0].buffer.items()}
  world.learner.compile(batch)
  assert [world.params_bytes(policy) for policy in range(POLICIES)] == before
  compiled = len(compilations)
  world.learner.turn()
  world.train(1)
  assert world.status['version'].tolist() == [1, 1]
  assert len(compilations) == compiled


def test_micro_batches_that_do_not_fit_a_device_are_refused():
  """Catches one that fits the batch, as `validate` can tell, but not half of it."""
  config = make_config()
  config.learner.microbatch = 4  # Of (4 + 1) · 4 = 20 observations, 10 on each device.
  with pytest.raises(ValueError, match='microbatch 4 does not divide the 10 .* of 2 devices'):
    compiled_update(config, ENV)


# The loop with the batcher's thread.


def batcher_threads() -> list[threading.Thread]:
  return [thread for thread in threading.enumerate() if thread.name == 'batcher']


def test_the_loop_trains_on_what_arrives_and_ends_when_told(world):
  """Catches a batch that is ready and not noticed, and a thread that stays."""
  asked: Iterator[int] = iter(range(1000))

  def save_if_asked() -> None:
    if next(asked) in (1, 2, 3):
      world.queue_batch()
      world.queue_batch(1)

  def should_stop() -> bool:
    return world.status['version'].tolist() == [3, 3]

  world.learner.run(should_stop, save_if_asked, timeout_s=0.02)
  assert world.status['stage'][-1] in (Stage.WAIT_BATCH, Stage.PUBLISH)
  assert batcher_threads() == []


def test_an_error_in_either_thread_ends_both_at_once(update, tmp_path, monkeypatch):
  """Catches a thread that keeps the process of a failed learner alive, and a lost exception."""
  world = World(update, tmp_path)
  start = time.monotonic()

  def run(timeout_s: float) -> None:
    too_late = start + 20
    world.learner.run(lambda: time.monotonic() > too_late, lambda: None, timeout_s=timeout_s)

  for _ in range(MAX_NON_FINITE):
    world.queue_batch(reward=np.nan)
  with pytest.raises(NonFiniteError):
    run(0.05)
  assert batcher_threads() == []

  def fail() -> bool:
    raise LookupError('of the batcher')

  monkeypatch.setattr(world.batcher, 'turn', fail)
  with pytest.raises(LookupError, match='of the batcher'):
    run(30.0)
  assert batcher_threads() == []
  assert time.monotonic() - start < 15


# Saving.


class FakeCheckpoints:
  """Notes what it is to save, or fails."""

  def __init__(self, error: Exception | None = None) -> None:
    self.saved: list[tuple[list[int], Any]] = []
    self.error = error

  def save(self, states: Any, progress: Any) -> int:
    if self.error is not None:
      raise self.error
    self.saved.append(([int(state.version) for state in states], progress))
    return 0


def make_saver(world: World, checkpoints: Any) -> Saver:
  timer = StageTimer(world.status, world.transport.topology.num_workers + 1)
  return Saver(checkpoints, world.learner, world.status, timer)


def test_a_save_holds_the_states_and_counters_of_all_policies(world):
  """Catches counters in another order, of one policy, and a save for each of many requests."""
  world.status['saves_asked'][0] = 5  # Before a resume.
  checkpoints = FakeCheckpoints()
  saver = make_saver(world, checkpoints)
  saver.save_if_asked()
  assert checkpoints.saved == []
  world.train(played=9, stale=2)
  world.train(1, played=8, stale=1)
  world.train(1)
  world.status['saves_asked'][0] += 2
  saver.save_if_asked()
  saver.save_if_asked()
  ((versions, progress),) = checkpoints.saved
  assert versions == [1, 2]
  assert progress.frames == [21, 69]
  assert (progress.samples, progress.samples_dropped) == ([7, 23], [2, 1])
  assert world.status['stage'][-1] == Stage.SAVE
  saver.save()
  assert len(checkpoints.saved) == 2


@pytest.mark.parametrize('error', (OSError(28, 'No space left on device'), ValueError('tensor')))
def test_a_save_that_fails_is_told_and_training_goes_on(world, capfd, error):
  """Catches a full disk as the end of a run."""
  checkpoints = FakeCheckpoints(error)
  saver = make_saver(world, checkpoints)
  world.train()
  world.status['saves_asked'][0] += 1
  saver.save_if_asked()
  assert 'checkpoint not saved' in capfd.readouterr().out
  world.train()
  assert world.status['version'][0] == 2
  checkpoints.error = None
  world.status['saves_asked'][0] += 1
  saver.save_if_asked()
  assert checkpoints.saved[0][0] == [2, 0]


def test_a_learner_that_does_not_train_saves_nothing(world):
  make_saver(world, None).save()
  assert world.status['stage'][-1] != Stage.SAVE
