"""Where each process spends its time, and the few words by which the runtime steers it.

Every process stamps the stage it enters into shared memory. The runtime reads the stamps for the
busy shares of the status line and judges from them whether a process is stuck.
"""

import enum
import time
from collections.abc import Mapping

import numpy as np

from sfjax.shm.slab import Topology
from sfjax.specs import ArraySpec, array_spec


class Stage(enum.IntEnum):
  """What a process does at the moment; the first group is waiting."""

  WAIT_ACTIONS = 0  # Worker: for the inference server.
  WAIT_ROWS = 1  # Worker: for the batcher to release a row.
  WAIT_REQUESTS = 2  # Server: for the workers.
  WAIT_BATCH = 3  # Learner: for the batcher.
  START = 4
  COMPILE = 5
  STEP = 6  # Worker: the environments.
  GATHER = 7
  ACT = 8
  SCATTER = 9
  LOAD_PARAMS = 10
  UPDATE = 11
  PUBLISH = 12
  SAVE = 13
  DONE = 14


WAITING = (Stage.WAIT_ACTIONS, Stage.WAIT_ROWS, Stage.WAIT_REQUESTS, Stage.WAIT_BATCH)

# How long one stay in a stage may last before the process counts as stuck. Waits are re-stamped
# at every timeout, so they have the same limit as work.
STAGE_LIMIT_S = {Stage.START: 120.0, Stage.COMPILE: 300.0, Stage.SAVE: 120.0, Stage.DONE: 120.0}
DEFAULT_LIMIT_S = 15.0


def status_specs(topology: Topology, num_policies: int) -> dict[str, ArraySpec]:
  """Returns the specs of the status block: processes are workers, then server, then learner."""
  processes = topology.num_workers + 2
  return {
    'stage': array_spec(np.int64, processes),
    'since_ns': array_spec(np.int64, processes),
    'spent_ns': array_spec(np.int64, processes, len(Stage)),
    # Set by the runtime.
    'stop': array_spec(np.int64, 1),
    'saves_asked': array_spec(np.int64, 1),
    # Set by the inference server: actions taken.
    'acted': array_spec(np.int64, 1),
    # Set by the learner: it has named the platform, published parameters, compiled its update.
    'platform_named': array_spec(np.int64, 1),
    'published': array_spec(np.int64, 1),
    'learner_ready': array_spec(np.int64, 1),
    # Likewise, per policy.
    'version': array_spec(np.int64, num_policies),
    'frames': array_spec(np.int64, num_policies),
    'samples': array_spec(np.int64, num_policies),
    'samples_dropped': array_spec(np.int64, num_policies),
  }


def server_index(topology: Topology) -> int:
  return topology.num_workers


def learner_index(topology: Topology) -> int:
  return topology.num_workers + 1


class StageTimer:
  """Stamps the stages of one process into the status block."""

  def __init__(self, status: Mapping[str, np.ndarray], process: int) -> None:
    self._stage = status['stage'][process : process + 1]
    self._since = status['since_ns'][process : process + 1]
    self._spent = status['spent_ns'][process]
    self._since[0] = time.monotonic_ns()
    self._stage[0] = Stage.START

  def enter(self, stage: Stage) -> None:
    """Ends the present stage and begins `stage`."""
    now = time.monotonic_ns()
    self._spent[self._stage[0]] += now - self._since[0]
    # In this order, and read in the other: a fresh stage never shows an old stamp.
    self._since[0] = now
    self._stage[0] = stage


def busy_share(spent_before: np.ndarray, spent_after: np.ndarray) -> float:
  """Returns the share of the time between two readings of `spent_ns` that was not waiting."""
  spent = (spent_after - spent_before).astype(np.float64)
  total = spent.sum()
  return float(1.0 - spent[..., list(WAITING)].sum() / total) if total > 0 else 0.0
