"""A run in one process: the loops of a run take turns, always in the same order.

Slower than the process tree and reproducible: the same seed gives the same parameters, bit for bit.
An environment that crashes takes the run with it.
"""

import signal
import time
import uuid
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from sfjax import entries
from sfjax.allocation import make_shared, plan
from sfjax.cleanup import remove_scratch
from sfjax.config import Config
from sfjax.metrics.advice import advice
from sfjax.metrics.report import Report
from sfjax.metrics.stages import StageTimer, learner_index, server_index
from sfjax.runtime import Outcome, decide_outcome


class SerialRun:
  """Workers, inference server, batcher and learner of one run, in turn."""

  def __init__(self, config: Config, workdir: Path) -> None:
    """Probes the environment and allocates.

    Raises:
      ValueError, ImportError: the configuration does not work on this machine.
    """
    self._created = time.monotonic()
    self._signal: int | None = None
    self.config = config
    self._scratch = entries.make_scratch(uuid.uuid4().hex[:12])
    try:
      env, self.topology = plan(config, self._scratch)
      self._shared = make_shared(config, self.topology, env, workdir=workdir, scratch=self._scratch)
    except BaseException:
      remove_scratch(self._scratch)
      raise
    # The loops end by our turns alone; there is no parent whose death they must notice.
    self.status = self._shared.map_status()
    self.report = Report(
      status=self.status,
      topology=self.topology,
      window=config.train.window,
      path=workdir / 'metrics.jsonl',
      advise=partial(advice, config=config),
    )

  def run(self, notes: list[str]) -> Outcome:
    """Builds all parts, takes turns to the end of the run and saves."""
    handlers = {
      signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    workers: list[Any] = []
    try:
      learner, saver, server = self._build()
      for note in notes:
        print(note, flush=True)
      for index in range(self.topology.num_workers):
        timer = StageTimer(self.status, index)
        workers.append(entries.make_worker(self._shared, index, 0, timer))
        workers[-1].start()
      outcome = self._take_turns(workers, server, learner, saver)
      saver.save()
      return outcome
    finally:
      for worker in workers:
        worker.close()
      remove_scratch(self._scratch)
      for signum, handler in handlers.items():
        signal.signal(signum, handler)

  def _build(self) -> tuple[Any, Any, Any]:
    entries.configure_xla(self.config.learner.num_threads or 1)
    from sfjax.inference.setup import make_policies
    from sfjax.learner.setup import build_learner

    timer = StageTimer(self.status, learner_index(self.topology))
    learner, saver = build_learner(self._shared, self.status, timer, trains=True)
    timer = StageTimer(self.status, server_index(self.topology))
    policies = make_policies(self._shared, timer, lambda: False)
    return learner, saver, entries.make_server(self._shared, self.status, policies, timer)

  def _take_turns(self, workers: list[Any], server: Any, learner: Any, saver: Any) -> Outcome:
    train, checkpoint = self.config.train, self.config.checkpoint
    self.report.begin()
    next_report = time.monotonic() + train.report_every_s
    next_save = time.monotonic() + checkpoint.every_s
    while True:
      for worker in workers:
        worker.turn()
      server.turn()
      learner.batcher.turn()
      learner.turn()
      self.report.add_episodes(self._shared.episodes.get_all())
      self.report.add_updates(self._shared.updates.get_all())
      now = time.monotonic()
      outcome = decide_outcome(train, self.status, self.report, self._signal, now - self._created)
      if outcome is not None or now >= next_report:
        print(self.report.write(), flush=True)
        next_report = now + train.report_every_s
      if outcome is not None:
        return outcome
      if now >= next_save:
        saver.save()
        next_save = now + checkpoint.every_s

  def _on_signal(self, signum: int, frame: FrameType | None) -> None:
    del frame
    self._signal = signum
