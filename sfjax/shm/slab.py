"""The trajectory slab, the stream table, and the records that speak of them.

Workers fill rows of the slab with observations and what became of the actions; the inference
server gathers observations from it and answers into a stream's mailbox; the batcher copies whole
rows out. Every field has one writer:

- slab rows and the stream table: the stream's worker; `released`: the learner's batcher;
- the mailbox: the inference server.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from sfjax.specs import ArraySpec, EnvSpec, array_spec

# A split asks for actions; the reply echoes it. `policy` < 0 marks a wake-up without a request.
REQUEST = np.dtype(
  [('worker', 'i4'), ('generation', 'i4'), ('split', 'i4'), ('policy', 'i4'), ('tick', 'i8')]
)
# To a worker: `served` streams of the request were answered; split < 0 tells of a released row.
REPLY = np.dtype([('generation', 'i4'), ('split', 'i4'), ('served', 'i4'), ('tick', 'i8')])
# A complete row, `serial` counting how often the row was queued.
TRAJECTORY = np.dtype([('row', 'i4'), ('serial', 'i8')])

NOT_WAITING = -1


@dataclass(frozen=True, kw_only=True)
class Topology:
  """How many workers, environments and rows there are, and how they are numbered.

  Streams are numbered worker by worker and split by split. Splits of a worker differ by at most
  one environment, the larger ones first.
  """

  worker_envs: tuple[int, ...]  # K of each worker.
  num_splits: int  # S.
  rows_per_stream: int  # R.
  rollout: int  # T.

  @property
  def num_workers(self) -> int:
    return len(self.worker_envs)

  @property
  def num_rows(self) -> int:
    return self.num_streams * self.rows_per_stream

  @cached_property
  def num_streams(self) -> int:
    return sum(self.worker_envs)

  @cached_property
  def first_streams(self) -> tuple[int, ...]:
    """The first stream of each worker."""
    return tuple(accumulate(self.worker_envs[:-1], initial=0))

  @cached_property
  def largest_split(self) -> int:
    return -(-max(self.worker_envs) // self.num_splits)

  def splits_of(self, worker: int) -> range:
    """The splits of a worker, fewer than S where there are fewer environments."""
    return range(min(self.num_splits, self.worker_envs[worker]))

  def streams_of(self, worker: int, split: int) -> slice:
    """The streams of one split of one worker."""
    size, larger = divmod(self.worker_envs[worker], self.num_splits)
    start = self.first_streams[worker] + split * size + min(split, larger)
    return slice(start, start + size + (split < larger))

  def worker_of_row(self, row: int) -> int:
    return bisect_right(self.first_streams, self.stream_of_row(row)) - 1

  def stream_of_row(self, row: int) -> int:
    return row // self.rows_per_stream


def slab_specs(
  topology: Topology, env: EnvSpec, core_size: int, *, behaviour_params: bool = False
) -> dict[str, ArraySpec]:
  """Returns the specs of the slab's fields, [rows, T+1, ...], [rows, T, ...] or [rows, ...].

  Facts only; what follows from them (discounts, validity) the learner derives. A played slot is
  one where an action was taken. Slot T holds the observation to bootstrap from.
  """
  rows, steps = topology.num_rows, topology.rollout
  specs = {
    f'obs/{key}': ArraySpec((rows, steps + 1, *spec.shape), spec.dtype)
    for key, spec in env.obs.items()
  }
  specs['first'] = array_spec(bool, rows, steps + 1)  # An episode starts here: reset the core.
  for name, dtype in (
    ('behaviour_log_prob', np.float32),
    ('behaviour_value', np.float32),
    ('rewards', np.float32),
    ('terminated', bool),
    ('played', bool),
    ('version', np.int32),  # That acted.
    ('learner_version', np.int32),  # The learner's when the action was given.
  ):
    specs[name] = array_spec(dtype, rows, steps)
  specs['actions'] = ArraySpec((rows, steps, env.action.size), env.action.stored.dtype)
  if env.mask_size:
    specs['action_mask'] = array_spec(bool, rows, steps, env.mask_size)
  if behaviour_params:  # Of the distribution that acted, for an exact KL.
    specs['behaviour_params'] = array_spec(np.float32, rows, steps, env.action.num_params)
  specs['core'] = array_spec(np.float32, rows, core_size)  # Core state that enters slot 0.
  specs['policy'] = array_spec(np.int32, rows)
  specs['generation'] = array_spec(np.int32, rows)
  # A row is free when the two are equal: one counter for each writer, so neither can be lost.
  specs['queued'] = array_spec(np.int64, rows)
  specs['released'] = array_spec(np.int64, rows)
  return specs


def stream_specs(
  topology: Topology, env: EnvSpec, core_size: int, *, behaviour_params: bool = False
) -> dict[str, ArraySpec]:
  """Returns the specs of the stream table and, behind `reply_`, of the mailboxes."""
  n = topology.num_streams
  ints = ('waiting', 'generation', 'row', 'slot', 'episode', 'step', 'reply_generation')
  specs = {name: array_spec(np.int32, n) for name in ints}
  specs['reply_tick'] = array_spec(np.int64, n)
  specs['core'] = array_spec(np.float32, n, core_size)
  specs['reply_core'] = array_spec(np.float32, n, core_size)
  specs['reply_action'] = ArraySpec((n, env.action.size), env.action.stored.dtype)
  if behaviour_params:
    specs['reply_params'] = array_spec(np.float32, n, env.action.num_params)
  specs['reply_log_prob'] = array_spec(np.float32, n)
  specs['reply_value'] = array_spec(np.float32, n)
  specs['reply_version'] = array_spec(np.int32, n)
  specs['reply_learner_version'] = array_spec(np.int32, n)
  return specs


def obs_keys(arrays: dict[str, np.ndarray]) -> list[str]:
  """The observation keys among a slab's field names."""
  return [name.removeprefix('obs/') for name in arrays if name.startswith('obs/')]
