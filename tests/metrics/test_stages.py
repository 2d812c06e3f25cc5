"""Stage stamps: where the time went, and what a reader sees while a stage changes."""

import time
from typing import Any

import numpy as np
import pytest

from sfjax.metrics import stages
from sfjax.metrics.stages import (
  WAITING,
  Stage,
  StageTimer,
  busy_share,
  learner_index,
  server_index,
  status_specs,
)
from tests.fakes import make_transport, zeros


@pytest.fixture
def clock(monkeypatch) -> list[int]:
  """Nanoseconds that pass only when told; the one element is the present time."""
  now = [1_000]
  monkeypatch.setattr(time, 'monotonic_ns', lambda: now[0])
  return now


def make_status() -> dict[str, np.ndarray]:
  return zeros(status_specs(make_transport(workers=3).topology, 2))


def test_time_is_spent_in_the_stage_that_ends(clock):
  """Catches time that goes to the next stage, is counted from the start, or to another process."""
  status = make_status()
  timer = StageTimer(status, 1)
  assert (status['stage'][1], status['since_ns'][1]) == (Stage.START, 1_000)
  for passed, stage in (
    (50, Stage.STEP),
    (30, Stage.WAIT_ACTIONS),
    (7, Stage.STEP),
    (2, Stage.STEP),
  ):
    clock[0] += passed
    timer.enter(stage)
    assert (status['stage'][1], status['since_ns'][1]) == (stage, clock[0])
  expected = np.zeros((5, len(Stage)), np.int64)
  # START lasted 50, STEP 30 and 2, WAIT_ACTIONS 7; the STEP entered last still lasts.
  expected[1, Stage.START], expected[1, Stage.STEP], expected[1, Stage.WAIT_ACTIONS] = 50, 32, 7
  np.testing.assert_array_equal(status['spent_ns'], expected)
  assert status['stage'][[0, 2, 3, 4]].tolist() == [0] * 4


def test_a_fresh_stage_never_shows_an_old_stamp():
  """Catches the order of the two writes: a reader would see a long stay in a short stage."""
  order: list[str] = []

  class Spy(np.ndarray):
    name: str

    def __setitem__(self, key: Any, value: Any) -> None:
      order.append(self.name)
      super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
      part = super().__getitem__(key)
      if isinstance(part, Spy):
        part.name = self.name
      return part

  status = make_status()
  for name in ('stage', 'since_ns'):
    status[name] = status[name].view(Spy)
    status[name].name = name  # pyright: ignore[reportAttributeAccessIssue]
  timer = StageTimer(status, 0)
  timer.enter(Stage.ACT)
  assert order == ['since_ns', 'stage'] * 2


def test_busy_is_what_is_not_waiting():
  """Catches a stage that waits and counts as busy, time before the interval, and 0 / 0."""
  before = np.zeros((2, len(Stage)), np.int64)
  before[:] = 10**12
  after = before.copy()
  after[0, Stage.STEP] += 300
  after[0, Stage.WAIT_ACTIONS] += 100
  after[1, Stage.WAIT_ROWS] += 600
  # Worker 0 was busy for 300 of 400, worker 1 for 0 of 600: together 300 of 1000.
  assert busy_share(before[0], after[0]) == pytest.approx(0.75)
  assert busy_share(before[1], after[1]) == 0.0
  assert busy_share(before, after) == pytest.approx(0.3)
  assert busy_share(before, before) == 0.0
  for stage in Stage:
    only = before[0].copy()
    only[stage] += 5
    waits = stage.name.startswith('WAIT')
    assert (busy_share(before[0], only) == 0.0) == waits == (stage in WAITING)


def test_processes_have_places_of_their_own():
  """Catches server and learner that stamp over a worker or each other."""
  topology = make_transport(workers=3).topology
  places = [0, 1, 2, server_index(topology), learner_index(topology)]
  assert sorted(places) == list(range(5))
  specs = status_specs(topology, 2)
  assert specs['spent_ns'].shape == (5, len(Stage))
  assert {specs[name].shape for name in ('stage', 'since_ns')} == {(5,)}
  counters = ('version', 'frames', 'samples', 'samples_dropped')
  assert {specs[name].shape for name in counters} == {(2,)}


def test_slow_stages_have_longer_limits():
  limits = {stage: stages.STAGE_LIMIT_S.get(stage, stages.DEFAULT_LIMIT_S) for stage in Stage}
  assert (limits[Stage.COMPILE], limits[Stage.SAVE], limits[Stage.STEP]) == (300.0, 120.0, 15.0)
