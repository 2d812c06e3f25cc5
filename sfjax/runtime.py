"""The process tree of a run: build it, watch it, stop it. Free of jax.

Reads sentinels, stage stamps, episode and update records; writes the stop flag, metrics and the
files of the run folder. Children are started from the main thread only: the kernel's parent-death
signal belongs to the thread that forked.
"""

import enum
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_sentinels
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from sfjax import entries
from sfjax.allocation import ChildDiedError, make_shared, plan
from sfjax.cleanup import kill_processes, remove_scratch
from sfjax.config import Config, TrainConfig
from sfjax.metrics.advice import advice
from sfjax.metrics.report import Report
from sfjax.metrics.stages import (
  DEFAULT_LIMIT_S,
  STAGE_LIMIT_S,
  Stage,
  learner_index,
  server_index,
)

POLL_S = 0.1
MAX_QUICK_DEATHS = 3  # Of one worker in a row, each within QUICK_DEATH_S of its start.
QUICK_DEATH_S = 20.0


class Outcome(enum.Enum):
  """Why a run ended in order."""

  MAX_FRAMES = 'max_frames'
  MAX_SECONDS = 'max_seconds'
  STOP_AT_RETURN = 'stop_at_return'
  SIGINT = 'SIGINT'
  SIGTERM = 'SIGTERM'


def decide_outcome(
  train: TrainConfig,
  status: dict[str, np.ndarray],
  report: Report,
  signum: int | None,
  elapsed_s: float,
) -> Outcome | None:
  """Returns why the run should end now, None while it should go on."""
  if signum is not None:
    return Outcome(signal.Signals(signum).name)
  if (status['frames'] >= train.max_frames).all():
    return Outcome.MAX_FRAMES
  if train.max_seconds is not None and elapsed_s >= train.max_seconds:
    return Outcome.MAX_SECONDS
  if train.stop_at_return is not None:
    means = [policy.full_window_return for policy in report.policies]
    if all(mean is not None and mean >= train.stop_at_return for mean in means):
      return Outcome.STOP_AT_RETURN
  return None


class Runtime:
  """The processes of one run."""

  def __init__(
    self,
    config: Config,
    workdir: Path,
    *,
    trains: bool = True,
    server_main: Callable[[entries.Shared], None] = entries.server_main,
  ) -> None:
    """Probes the environment and allocates; of what stays only the guardian is started.

    Args:
      config: resolved and valid.
      workdir: the run folder.
      trains: false: the first parameters are published and every trajectory discarded.
      server_main: what the inference server runs; a benchmark acts without a network.

    Raises:
      ValueError, ImportError: the configuration does not work on this machine.
    """
    self.config, self.workdir = config, workdir
    self._trains, self._server_main = trains, server_main
    self._created = time.monotonic()
    self._signal: int | None = None
    self._handlers = {
      signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    self._run_id = uuid.uuid4().hex[:12]
    resource_tracker.ensure_running()  # Before the run id: the tracker ends by itself.
    os.environ[entries.RUN_ID] = self._run_id
    self._context = multiprocessing.get_context('spawn')
    self._scratch = entries.make_scratch(self._run_id)
    self._guardian, self._alive = self._start_guardian()
    self._workers: list[Any] = []
    self._generations: list[int] = []
    self._started_at: list[float] = []
    self._quick_deaths: list[int] = []
    try:
      env, self.topology = plan(config, self._scratch)
      self.shared = make_shared(config, self.topology, env, workdir=workdir, scratch=self._scratch)
    except BaseException:
      self._release()
      raise
    self.status = self.shared.map_status()
    self.report = Report(
      status=self.status,
      topology=self.topology,
      window=config.train.window,
      path=workdir / 'metrics.jsonl',
      advise=partial(advice, config=config),
    )

  def run(self, notes: Sequence[str] = ()) -> Outcome:
    """Starts all processes, watches them to the end of the run and stops them.

    Args:
      notes: lines to print once the platform is named, which comes first.

    Raises:
      ChildDiedError: server, learner or a worker could not be kept alive.
    """
    try:
      self.start(notes)
      return self._watch()
    finally:
      self.stop()

  def start(self, notes: Sequence[str] = ()) -> None:
    """Starts learner and server, then the workers, which would wait for these anyway."""
    self._learner = self._spawn('learner', entries.learner_main, self.shared, self._trains)
    self._server = self._spawn('server', self._server_main, self.shared)
    while not self.status['platform_named'][0] and self._signal is None:
      self.poll()
    for note in notes:
      print(note, flush=True)
    for index in range(self.topology.num_workers):
      self._generations.append(0)
      self._started_at.append(0.0)
      self._quick_deaths.append(0)
      self._workers.append(self._spawn_worker(index))

  def stop(self) -> None:
    """Stops every process in order: each ends its loop, the learner saves; then the last resort."""
    self.status['stop'][0] = 1
    self.shared.requests.put(-1, 0, 0, -1, 0)
    for queue in self.shared.replies:
      queue.put(0, -1, 0, 0)
    processes = [p for p in (*self._workers, getattr(self, '_server', None)) if p is not None]
    learner = getattr(self, '_learner', None)
    self._join(processes, DEFAULT_LIMIT_S)
    if learner is not None:
      self._join([learner], STAGE_LIMIT_S[Stage.SAVE])
    self._release()

  def _join(self, processes: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
      process.join(max(0.0, deadline - time.monotonic()))
      if process.exitcode is None:
        print(f'{process.name} did not stop within {timeout_s:.0f} s; killed', flush=True)
        process.kill()
        process.join()

  def _on_signal(self, signum: int, frame: FrameType | None) -> None:
    del frame
    self._signal = signum

  def _start_guardian(self) -> tuple[Any, Any]:
    receiver, sender = self._context.Pipe(duplex=False)
    guardian = self._context.Process(
      target=entries.guardian_main,
      args=(os.getpid(), self._run_id, self._scratch, receiver),
      name='guardian',
    )
    guardian.start()
    receiver.close()
    return guardian, sender

  def _release(self) -> None:
    """Lets the guardian clean up, as it would after a crash, and gives the signals back."""
    self._alive.close()
    self._guardian.join(DEFAULT_LIMIT_S)
    if self._guardian.exitcode != 0:  # It was lost itself.
      kill_processes(self._run_id, spare=os.getpid())
      remove_scratch(self._scratch)
    os.environ.pop(entries.RUN_ID, None)
    for signum, handler in self._handlers.items():
      signal.signal(signum, handler)

  def _spawn(self, name: str, target: Any, *args: Any) -> Any:
    process = self._context.Process(target=target, args=args, name=name)
    process.start()
    return process

  def _spawn_worker(self, index: int) -> Any:
    self._started_at[index] = time.monotonic()
    self.status['since_ns'][index] = time.monotonic_ns()
    self.status['stage'][index] = Stage.START
    generation = self._generations[index]
    return self._spawn(f'worker {index}', entries.worker_main, self.shared, index, generation)

  def _watch(self) -> Outcome:
    config = self.config
    next_report, next_save = 0.0, time.monotonic() + config.checkpoint.every_s
    while True:
      self.poll()
      outcome = decide_outcome(
        config.train, self.status, self.report, self._signal, time.monotonic() - self._created
      )
      if outcome is not None:
        print(self.report.write(), flush=True)
        return outcome
      now = time.monotonic()
      if not next_report:
        if self.status['learner_ready'][0]:
          self.report.begin()
          next_report = now + config.train.report_every_s
      elif now >= next_report:
        print(self.report.write(), flush=True)
        next_report = now + config.train.report_every_s
      if now >= next_save:
        self.status['saves_asked'][0] += 1
        next_save = now + config.checkpoint.every_s

  def poll(self) -> None:
    """Waits a moment, takes what the processes tell, and sees to those that ended.

    Raises:
      ChildDiedError: see `run`.
    """
    sentinels = [p.sentinel for p in (*self._workers, self._server, self._learner)]
    wait_for_sentinels(sentinels, timeout=POLL_S)
    self._drain()
    self._check_children()

  def _drain(self) -> None:
    self.report.add_episodes(self.shared.episodes.get_all())
    self.report.add_updates(self.shared.updates.get_all())

  def _check_children(self) -> None:
    for index, process in enumerate(self._workers):
      stuck = self._stuck(index)
      if stuck is not None:
        print(f'worker {index} is stuck: {stuck}; killed', flush=True)
        process.kill()
        process.join()
      if process.exitcode is not None:
        self._restart_worker(index, process.exitcode)
    for process, index in (
      (self._server, server_index(self.topology)),
      (self._learner, learner_index(self.topology)),
    ):
      stuck = self._stuck(index)
      if process.exitcode is not None or stuck is not None:
        reason = stuck or f'ended with exit code {process.exitcode}'
        raise ChildDiedError(f'the {process.name} {reason}; what it said is above')

  def _stuck(self, index: int) -> str | None:
    stage = Stage(int(self.status['stage'][index]))
    since = int(self.status['since_ns'][index])
    seconds = (time.monotonic_ns() - since) * 1e-9
    limit = STAGE_LIMIT_S.get(stage, DEFAULT_LIMIT_S)
    if since and seconds > limit:
      return f'in stage {stage.name} for {seconds:.0f} s (limit {limit:.0f} s)'
    return None

  def _restart_worker(self, index: int, exitcode: int) -> None:
    quick = time.monotonic() - self._started_at[index] < QUICK_DEATH_S
    self._quick_deaths[index] = self._quick_deaths[index] + 1 if quick else 0
    if self._quick_deaths[index] >= MAX_QUICK_DEATHS:
      raise ChildDiedError(
        f'worker {index} ended {MAX_QUICK_DEATHS} times in a row within {QUICK_DEATH_S:.0f} s of '
        f'its start, last with exit code {exitcode}; what it said is above'
      )
    self._generations[index] += 1
    print(
      f'worker {index} ended with exit code {exitcode}; restarted as generation '
      f'{self._generations[index]}',
      flush=True,
    )
    self._workers[index] = self._spawn_worker(index)
