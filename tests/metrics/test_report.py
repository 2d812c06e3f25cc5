"""The report: running means, and lines of metrics.jsonl that any reader can parse."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfjax.metrics.records import EPISODE, UPDATE, UPDATE_METRICS
from sfjax.metrics.report import PolicyReport, Report
from sfjax.metrics.stages import Stage, status_specs
from tests.fakes import make_transport, zeros

REQUIRED = (
  'time_s frames samples samples_dropped version policy frames_per_s episode_return_mean '
  'episode_length_mean episodes lag_updates_mean lag_updates_max loss policy_loss value_loss '
  'entropy approx_kl grad_norm'
).split()


class World:
  """A report of two policies and three workers, with a clock that passes only when told."""

  def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, window=3) -> None:
    self.now = 50.0
    monkeypatch.setattr(time, 'monotonic', lambda: self.now)
    topology = make_transport(workers=3).topology
    self.status = zeros(status_specs(topology, 2))
    self.path = path / 'metrics.jsonl'
    self.report = Report(status=self.status, topology=topology, window=window, path=self.path)

  def episodes(self, *episodes: tuple[int, int, float]) -> None:
    """Finishes episodes (policy, length, return)."""
    records = np.zeros(len(episodes), EPISODE)
    for record, (policy, length, episode_return) in zip(records, episodes, strict=True):
      record['policy'], record['length'] = policy, length
      record['episode_return'], record['tics'] = episode_return, 4 * length
    self.report.add_episodes(records)

  def updates(self, *updates: dict[str, float]) -> None:
    """Tells of updates; metrics that are not given are 1."""
    records = np.ones(len(updates), UPDATE)
    records['policy'] = 0
    for record, values in zip(records, updates, strict=True):
      for name, value in values.items():
        record[name] = value
    self.report.add_updates(records)

  def write(self) -> tuple[list[dict[str, Any]], str]:
    """Writes, and returns the new lines and the status line."""
    before = len(self.path.read_text().splitlines()) if self.path.exists() else 0
    line = self.report.write()

    def refuse(constant: str) -> None:
      raise AssertionError(f'{constant} is no JSON')

    rows = self.path.read_text().splitlines()[before:]
    return [json.loads(row, parse_constant=refuse) for row in rows], line


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
  return World(tmp_path, monkeypatch)


def test_a_line_a_policy_with_all_keys_from_the_first_on(world):
  """Catches a key that is missing until something happened, and zeros for what is not known."""
  (first, second), line = world.write()
  assert (first['policy'], second['policy']) == (0, 1)
  for row in (first, second):
    assert row.keys() >= {*REQUIRED, *UPDATE_METRICS}
    unknown = ('episode_return_mean', 'episode_length_mean', *UPDATE_METRICS)
    assert [row[name] for name in unknown] == [None] * len(unknown)
    assert row['episodes'] == row['frames'] == row['frames_per_s'] == 0
  assert line.count('return - length - (0 episodes finished)') == 2
  world.episodes((0, 10, 5.0))
  world.updates({})
  rows, _ = world.write()
  assert [list(row) for row in rows] == [list(first)] * 2


def test_counters_are_those_of_the_policy_and_rates_those_of_the_interval(world):
  """Catches counters of policy 0 for all, and frames per second since the start."""
  world.status['frames'][:] = 500, 700  # Of an earlier start.
  world.now += 10
  world.report.begin()
  world.status['frames'][:] = 900, 800
  world.status['samples'][:] = 90, 80
  world.status['samples_dropped'][:] = 9, 8
  world.status['version'][:] = 4, 3
  world.now += 4
  rows, line = world.write()
  assert [row['frames_per_s'] for row in rows] == [100.0, 25.0]
  for name, values in world.status.items():
    if name in ('frames', 'samples', 'samples_dropped', 'version'):
      assert [row[name] for row in rows] == values.tolist()
  assert [row['time_s'] for row in rows] == [14.0, 14.0]
  # 125 in the interval; 500 new frames in the 14 s since the start make 36.
  assert '125 frames/s (36 overall)' in line
  world.status['frames'][1] += 60
  world.now += 2
  rows, _ = world.write()
  assert [row['frames_per_s'] for row in rows] == [0.0, 30.0]


def test_means_are_over_the_last_episodes_of_each_policy(world):
  """Catches a mean over all episodes, or over those of another policy."""
  world.episodes((0, 10, 1.0), (1, 70, -8.0), (0, 20, 2.0))
  assert world.report.policies[0].full_window_return is None
  world.episodes((0, 30, 6.0), (0, 40, 7.0))
  (first, second), _ = world.write()
  # The window holds 3: returns 2, 6, 7 and lengths 20, 30, 40.
  assert (first['episode_return_mean'], first['episode_length_mean']) == (5.0, 30.0)
  assert (first['episodes'], second['episodes']) == (4, 1)
  assert (second['episode_return_mean'], second['episode_length_mean']) == (-8.0, 70.0)
  assert world.report.policies[0].full_window_return == 5.0
  again, _ = world.write()
  assert again[0]['episode_return_mean'] == 5.0  # Episodes outlive the interval.


def test_a_window_is_full_when_it_is():
  """Catches a run that stops at the return of a few lucky episodes."""
  report = PolicyReport(window=2)
  assert (report.return_mean, report.full_window_return) == (None, None)
  report.returns.append(3.0)
  assert (report.return_mean, report.full_window_return) == (3.0, None)
  report.returns.append(4.0)
  assert report.full_window_return == 3.5


def test_updates_are_averaged_over_the_interval_and_maxima_are_maxima(world):
  """Catches the last update for all, a mean of maxima, and updates that are counted again."""
  world.updates(
    {'loss': 1.0, 'lag_updates_mean': 2.0, 'lag_updates_max': 9.0, 'ratio_max': 1.5}
    | {'lag_updates_stale_mean': 0.5, 'lag_updates_backlog_mean': 3.5},
    {'loss': 4.0, 'lag_updates_mean': 6.0, 'lag_updates_max': 3.0, 'ratio_max': 1.1},
    {'loss': 1.0, 'lag_updates_mean': 4.0, 'lag_updates_max': 5.0, 'ratio_max': 1.2},
  )
  (first, second), line = world.write()
  assert (first['loss'], first['lag_updates_mean']) == (2.0, 4.0)
  assert (first['lag_updates_max'], first['ratio_max']) == (9.0, 1.5)
  assert second['loss'] is None
  # (0.5 + 1 + 1) / 3 and (3.5 + 1 + 1) / 3.
  assert 'lag 4.0 (0.8 stale + 1.8 backlog) max 9' in line
  world.updates({'loss': 8.0, 'lag_updates_max': 2.0})
  (first, _), _ = world.write()
  assert (first['loss'], first['lag_updates_max']) == (8.0, 2.0)
  (first, _), _ = world.write()
  assert first['loss'] is None


@pytest.mark.parametrize('bad', (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_is_null(world, bad):
  """Catches NaN and Infinity in the file, which no strict reader of JSON takes."""
  world.updates({'loss': bad, 'lag_updates_max': bad})
  world.episodes((1, 3, bad))
  (first, second), _ = world.write()
  assert (first['loss'], first['lag_updates_max'], first['entropy']) == (None, None, 1.0)
  assert (second['episode_return_mean'], second['episode_length_mean']) == (None, 3.0)


def test_lines_are_appended_to_those_of_an_earlier_start(world):
  """Catches a resumed run that empties its metrics."""
  world.path.write_text('{"time_s": 1}\n')
  world.write()
  lines = world.path.read_text().splitlines()
  assert lines[0] == '{"time_s": 1}'
  assert len(lines) == 3


def test_a_file_that_cannot_be_written_does_not_end_the_run(world, capsys):
  """Catches a full or lost disk as the end of training."""
  world.path.mkdir()
  assert 'frames/s' in world.report.write()
  assert 'metrics not written, training goes on' in capsys.readouterr().out
  world.path.rmdir()
  rows, _ = world.write()
  assert len(rows) == 2


def test_busy_shares_are_those_of_the_interval(world):
  """Catches shares since the start of the run, when everything compiled, and mixed processes."""
  spent = world.status['spent_ns']
  spent[:, Stage.COMPILE] += 10**6
  world.report.begin()
  spent[0:3, Stage.STEP] += [60, 20, 10]  # Workers: 90 of 300.
  spent[0:3, Stage.WAIT_ACTIONS] += [40, 80, 90]
  spent[3, Stage.ACT] += 50  # Server: 50 of 100.
  spent[3, Stage.WAIT_REQUESTS] += 50
  spent[4, Stage.UPDATE] += 80  # Learner: 80 of 100.
  spent[4, Stage.WAIT_BATCH] += 20
  shares = world.report.busy_shares()
  assert shares == pytest.approx({'workers': 0.3, 'server': 0.5, 'learner': 0.8})
  _, line = world.write()
  assert line.endswith('busy workers 30% server 50% learner 80%')
  spent[4, Stage.WAIT_BATCH] += 20
  assert world.report.busy_shares() == {'workers': 0.0, 'server': 0.0, 'learner': 0.0}


def test_one_policy_is_not_named_and_several_are(world, tmp_path):
  _, line = world.write()
  assert 'policy 0: frames 0 version 0' in line and 'policy 1: ' in line
  topology = make_transport(workers=3).topology
  status = zeros(status_specs(topology, 1))
  single = Report(status=status, topology=topology, window=3, path=tmp_path / 'single.jsonl')
  assert 'policy' not in single.write()
