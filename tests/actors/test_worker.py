"""The worker's loop: one split goes on while another waits, and waits end."""

from typing import Any

import numpy as np
import pytest

from sfjax.actors.worker import Worker
from sfjax.metrics.stages import WAITING, Stage, StageTimer, status_specs
from tests.fakes import (
  TERMINATED,
  FakeEnv,
  FakeServer,
  Transport,
  make_split,
  make_transport,
  take_rows,
  zeros,
)


class Bench:
  """A worker of two splits with one environment each, and a server that answers when told."""

  def __init__(self, *, generation: int = 0, transport: Transport | None = None) -> None:
    self.transport = transport or make_transport(envs=2, splits=2, rows=2, rollout=2)
    self.server = FakeServer(self.transport)
    self.envs = [FakeEnv(i, [(10**9, TERMINATED)], generation=generation) for i in range(2)]
    splits = [
      make_split(self.transport, [env], index=i, generation=generation)
      for i, env in enumerate(self.envs)
    ]
    self.status = zeros(status_specs(self.transport.topology, 1))
    self.timer = StageTimer(self.status, 0)
    self.worker = Worker(
      generation=generation,
      splits=splits,
      replies=self.transport.replies[0],
      timer=self.timer,
    )
    self.worker.start()

  @property
  def steps(self) -> list[int]:
    return [len(env.episodes[-1].actions) for env in self.envs]

  def requests(self) -> dict[int, Any]:
    """The requests that wait, by split."""
    return {int(request['split']): request for request in self.transport.requests.get_all()}

  def answer(self, request: Any) -> None:
    served = self.server.answer(request)
    self.transport.replies[0].put(request['generation'], request['split'], served, request['tick'])

  def stage(self) -> Stage:
    return Stage(int(self.status['stage'][0]))


@pytest.mark.parametrize('withheld', (0, 1))
def test_a_split_without_its_answer_does_not_hold_the_other_up(withheld):
  """Catches splits that step in lockstep or in a fixed order."""
  bench, other = Bench(), 1 - withheld
  waiting = bench.requests()
  kept, request = waiting[withheld], waiting[other]
  for step in range(1, 9):
    bench.answer(request)
    assert bench.worker.turn()
    assert not bench.worker.turn()
    assert bench.steps[other] == step
    assert bench.steps[withheld] == 0
    take_rows(bench.transport)
    bench.transport.replies[0].put(0, -1, 0, 0)
    if step < 8:
      bench.worker.turn()
      request = bench.requests()[other]
  bench.answer(kept)
  assert bench.worker.turn()
  assert bench.steps[withheld] == 1


def test_replies_to_the_generation_before_are_not_counted():
  """Catches a worker that steps on answers which its predecessor asked for."""
  before = Bench()
  old = before.requests()
  bench = Bench(generation=1, transport=before.transport)
  for request in old.values():
    bench.answer(request)
  assert not bench.worker.turn()
  for request in bench.requests().values():
    bench.answer(request)
  assert bench.worker.turn()
  assert bench.steps == [1, 1]


def test_a_worker_says_what_it_waits_for_and_a_release_wakes_it(monkeypatch):
  """Catches a wake-up that is lost between the last look and the wait, and a wrong stage."""
  bench, waits, turns = Bench(), [], iter([False] * 12 + [True])
  replies = bench.transport.replies[0]
  really_wait, really_enter = replies.wait, bench.timer.enter

  def enter(stage: Stage) -> None:
    really_enter(stage)
    if stage in WAITING:
      waits.append((stage, *bench.steps))
      for request in bench.requests().values():
        bench.answer(request)
    if stage == Stage.WAIT_ROWS:
      take_rows(bench.transport)
      replies.put(0, -1, 0, 0)

  def wait(timeout_s: float) -> bool:
    assert really_wait(timeout_s), 'nobody told the worker'
    return True

  monkeypatch.setattr(bench.timer, 'enter', enter)
  monkeypatch.setattr(replies, 'wait', wait)
  bench.worker.run(lambda: next(turns), timeout_s=5.0)
  # Two rows of two steps each, then nothing until the release, which the next turn sees.
  actions, rows = Stage.WAIT_ACTIONS, Stage.WAIT_ROWS
  steps = [(actions, n, n) for n in range(4)]
  assert waits == [*steps, (rows, 4, 4), (actions, 4, 4)]
  assert bench.steps == [5, 5]


def test_a_worker_with_a_split_that_waits_for_actions_is_not_starved_of_rows():
  """Catches a wait for the server that is told as one for the learner."""
  bench = Bench()
  for _ in range(4):
    bench.answer(bench.requests()[0])
    bench.worker.turn()
  turns = iter((False, True))
  bench.worker.run(lambda: next(turns), timeout_s=0.0)
  assert bench.steps == [4, 0]
  assert bench.stage() == Stage.WAIT_ACTIONS


def test_closing_closes_every_environment():
  bench = Bench()
  bench.worker.close()
  np.testing.assert_array_equal([env.closed for env in bench.envs], True)
