"""The environment worker: the loop around its splits.

Reads replies and releases from its own queue; while one split waits for its actions another steps.
"""

from collections.abc import Callable

from sfjax.actors.splits import Split
from sfjax.metrics.stages import Stage, StageTimer
from sfjax.shm.queues import RecordQueue


class Worker:
  """K environments in S splits."""

  def __init__(
    self, *, generation: int, splits: list[Split], replies: RecordQueue, timer: StageTimer
  ) -> None:
    self._generation = generation
    self._splits = splits
    self._replies = replies
    self._timer = timer

  def start(self) -> None:
    """Resets all environments and sends the first requests."""
    for split in self._splits:
      split.start()
      if split.can_request:
        split.request()

  def turn(self) -> bool:
    """Does what can be done without waiting; returns whether anything was."""
    for record in self._replies.get_all():
      if record['generation'] == self._generation and record['split'] >= 0:
        self._splits[record['split']].receive(int(record['tick']), int(record['served']))
    progressed = False
    for split in self._splits:
      if split.can_step:
        self._timer.enter(Stage.STEP)
        split.step()
        progressed = True
      if split.waits_for_rows:
        split.open_held_rows()
      if split.can_request:
        split.request()
        progressed = True
    return progressed

  def run(self, should_stop: Callable[[], bool], *, timeout_s: float = 0.5) -> None:
    """Takes turns until told to stop."""
    while not should_stop():
      if not self.turn():
        starved = all(split.waits_for_rows for split in self._splits)
        self._timer.enter(Stage.WAIT_ROWS if starved else Stage.WAIT_ACTIONS)
        self._replies.wait(timeout_s)

  def close(self) -> None:
    """Closes all environments."""
    for split in self._splits:
      split.close()
