"""The report of a run: running means, the status line, and metrics.jsonl.

Reads episode and update records and the status block; writes one line a policy and interval.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sfjax.metrics.records import UPDATE_METRICS
from sfjax.metrics.stages import busy_share, learner_index, server_index
from sfjax.shm.slab import Topology

ADVICE_INTERVALS = 12  # Between warnings about one policy.

Advise = Callable[[Mapping[str, Any]], list[str]]


def _mean(values: Any) -> float | None:
  return float(np.mean(values)) if len(values) else None


def _text(value: float | None, digits: int = 2) -> str:
  return '-' if value is None else f'{value:.{digits}f}'


class PolicyReport:
  """Running statistics of one policy."""

  def __init__(self, window: int) -> None:
    self.returns: deque[float] = deque(maxlen=window)
    self.lengths: deque[int] = deque(maxlen=window)
    self.episodes = 0
    self.updates: list[np.ndarray] = []  # Since the last line.

  @property
  def return_mean(self) -> float | None:
    """Mean return of the episodes in the window, None before the first."""
    return _mean(self.returns)

  @property
  def full_window_return(self) -> float | None:
    """Mean return once the window is full."""
    return self.return_mean if len(self.returns) == self.returns.maxlen else None

  def take_updates(self) -> dict[str, float | None]:
    """Returns the mean of each update metric since the last call; of a maximum, the maximum."""
    updates, self.updates = self.updates, []
    if not updates:
      return dict.fromkeys(UPDATE_METRICS)
    rows = np.array(updates)
    return {
      name: float((np.max if name.endswith('_max') else np.mean)(rows[name]))
      for name in UPDATE_METRICS
    }


class Report:
  """Collects what the processes tell and writes it down."""

  def __init__(
    self,
    *,
    status: dict[str, np.ndarray],
    topology: Topology,
    window: int,
    path: Path,
    advise: Advise = lambda metrics: [],
  ) -> None:
    """Starts with nothing.

    Args:
      status: the status block.
      topology: of the run.
      window: episodes in the running means.
      path: of metrics.jsonl.
      advise: from an interval's update metrics to lines on what is out of hand.
    """
    self._status, self._topology = status, topology
    self._path, self._advise = path, advise
    self._silent = [0] * len(status['frames'])  # Intervals to go before the next advice.
    self._start = time.monotonic()
    self.policies = [PolicyReport(window) for _ in status['frames']]
    self._last_time = self._start
    self._last_frames = np.zeros(len(self.policies), np.int64)
    self._first_frames: np.ndarray | None = None
    self._last_spent = status['spent_ns'].copy()

  def begin(self) -> None:
    """Marks the start of training; frames of earlier starts and compiling are behind it."""
    self._first_frames = self._status['frames'].copy()
    self._last_frames = self._first_frames.copy()
    self._last_time = time.monotonic()
    self._last_spent = self._status['spent_ns'].copy()

  def add_episodes(self, records: np.ndarray) -> None:
    """Takes `EPISODE` records."""
    for record in records:
      policy = self.policies[record['policy']]
      policy.returns.append(float(record['episode_return']))
      policy.lengths.append(int(record['length']))
      policy.episodes += 1

  def add_updates(self, records: np.ndarray) -> None:
    """Takes `UPDATE` records."""
    for record in records:
      self.policies[int(record['policy'])].updates.append(record)

  def write(self) -> str:
    """Appends a line a policy to metrics.jsonl and returns the status line."""
    now = time.monotonic()
    interval = max(now - self._last_time, 1e-9)
    frames = self._status['frames'].copy()
    rate = (frames - self._last_frames) / interval
    rows = [self._row(i, now, float(rate[i])) for i in range(len(self.policies))]
    self._append(rows)
    line = '\n'.join([self._line(rows, now, float(rate.sum())), *self._advice(rows)])
    self._last_time, self._last_frames = now, frames
    self._last_spent = self._status['spent_ns'].copy()
    return line

  def _row(self, policy: int, now: float, rate: float) -> dict[str, Any]:
    report, status = self.policies[policy], self._status
    return {
      'time_s': round(now - self._start, 3),
      'policy': policy,
      'version': int(status['version'][policy]),
      'frames': int(status['frames'][policy]),
      'samples': int(status['samples'][policy]),
      'samples_dropped': int(status['samples_dropped'][policy]),
      'frames_per_s': rate,
      'episodes': report.episodes,
      'episode_return_mean': report.return_mean,
      'episode_length_mean': _mean(report.lengths),
      **report.take_updates(),
    }

  def _advice(self, rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for policy, row in enumerate(rows):
      told = self._advise(row) if not self._silent[policy] else []
      self._silent[policy] = ADVICE_INTERVALS if told else max(self._silent[policy] - 1, 0)
      name = f'policy {policy}: ' if len(rows) > 1 else ''
      lines += [f'warning: {name}{line}' for line in told]
    return lines

  def _append(self, rows: list[dict[str, Any]]) -> None:
    try:
      with self._path.open('a') as file:
        for row in rows:
          finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
          }
          file.write(json.dumps(finite) + '\n')
    except OSError as error:
      print(f'{self._path}: metrics not written, training goes on: {error}', flush=True)

  def busy_shares(self) -> dict[str, float]:
    """Busy share of workers (their mean), server and learner since the last line."""
    workers, server, learner = (
      slice(0, self._topology.num_workers),
      server_index(self._topology),
      learner_index(self._topology),
    )
    spent = self._status['spent_ns'].copy()
    return {
      name: busy_share(self._last_spent[part], spent[part])
      for name, part in (('workers', workers), ('server', server), ('learner', learner))
    }

  def _line(self, rows: list[dict[str, Any]], now: float, rate: float) -> str:
    frames = self._status['frames']
    first = frames if self._first_frames is None else self._first_frames
    since_start = float((frames - first).sum()) / max(now - self._start, 1e-9)
    busy = ' '.join(f'{name} {share:.0%}' for name, share in self.busy_shares().items())
    parts = [f'{now - self._start:6.0f} s', f'{rate:,.0f} frames/s ({since_start:,.0f} overall)']
    for row in rows:
      name = f'policy {row["policy"]}: ' if len(rows) > 1 else ''
      finished = f'{row["episodes"]} episodes' if row['episodes'] else '0 episodes finished'
      parts.append(
        f'{name}frames {row["frames"]:,} version {row["version"]}'
        f' | return {_text(row["episode_return_mean"])} length'
        f' {_text(row["episode_length_mean"], 1)} ({finished})'
        f' | lag {_text(row["lag_updates_mean"], 1)} ('
        f'{_text(row["lag_updates_stale_mean"], 1)} stale + '
        f'{_text(row["lag_updates_backlog_mean"], 1)} backlog) '
        f'max {_text(row["lag_updates_max"], 0)}'
      )
    return ' | '.join([*parts, f'busy {busy}'])
