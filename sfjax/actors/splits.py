"""A split: the environments of a worker that step together, and the rows they fill.

Reads actions from the mailboxes of its streams, steps its environments, writes observations and
outcomes into the slab, and puts complete rows on the trajectory queue.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sfjax.actors.policy_mapping import policies_of_streams
from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import NOT_WAITING, Topology
from sfjax.specs import MASK, EnvSpec, random_action, split_obs

Arrays = dict[str, np.ndarray]


class Env(Protocol):
  """The part of `gymnasium.Env` that a split uses."""

  def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]: ...
  def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...
  def close(self) -> None: ...


Decode = Callable[[np.ndarray], list[Any]]  # From stored actions [n, A] to what `step` takes.


def episode_seed(seed: int, stream: int, episode: int) -> int:
  """Returns the seed of an episode, which depends on nothing but its identity."""
  return int(np.random.SeedSequence((seed, stream, episode)).generate_state(1)[0])


class Split:
  """K/S environments stepped together.

  One observation of a stream is one slot of its row. A truncated episode takes one more slot, not
  played, for its final observation: the learner then values it like any other. Slot T is never
  played; what stands there opens the stream's next row, unless it is such a final observation.
  """

  def __init__(
    self,
    *,
    worker: int,
    generation: int,
    index: int,
    envs: Sequence[Env],
    spec: EnvSpec,
    decode: Decode,
    topology: Topology,
    slab: Arrays,
    streams: Arrays,
    requests: RecordQueue,
    trajectories: RecordQueue,
    on_episode: Callable[[int, int, bool, int, int, float], None],
    num_policies: int,
    seed: int,
    reward_scale: float,
    random_starts: Sequence[int] = (),
    partial: bool = False,
  ) -> None:
    part = topology.streams_of(worker, index)
    self._worker, self._generation, self._index = worker, generation, index
    self._envs, self._topology, self._slab = envs, topology, slab
    self._spec, self._decode = spec, decode
    self._table = {name: array[part] for name, array in streams.items()}
    self._requests, self._trajectories = requests, trajectories
    self._on_episode = on_episode
    self._seed, self._reward_scale = seed, reward_scale
    # How many random actions each environment takes before its first row; they are neither trained
    # on nor counted.
    self._random_starts = random_starts or [0] * len(envs)
    self._streams = np.arange(part.start, part.stop)
    self._policies = policies_of_streams(self._streams, num_policies)
    self._obs = {
      name.removeprefix('obs/'): array for name, array in slab.items() if name.startswith('obs/')
    }
    n = len(envs)
    self._rows = self._streams * topology.rows_per_stream
    self._slots = np.zeros(n, np.int64)
    self._returns = np.zeros(n)
    self._tics = np.zeros(n, np.int64)
    self._begun_at_random = np.zeros(n, bool)  # Its return is not one of the policy's.
    # Observations that open a row which is not free yet: stream of the split -> (obs, first).
    self._held: dict[int, tuple[dict[str, np.ndarray], bool]] = {}
    # Whether streams go on while others of the split wait for a row. It keeps a synchronous batch
    # from waiting for itself; otherwise waiting for all keeps the inference batches large.
    self._partial = partial
    self._active = np.arange(n)  # Streams of the present request.
    self._tick = 0
    self._unanswered = 0
    self._asked = False

  @property
  def waits_for_actions(self) -> bool:
    return self._unanswered > 0

  @property
  def waits_for_rows(self) -> bool:
    return bool(self._held)

  @property
  def can_request(self) -> bool:
    """Whether nothing is asked and enough streams have a row to ask for."""
    return not self._asked and (
      not self._held or self._partial and len(self._held) < len(self._envs)
    )

  @property
  def can_step(self) -> bool:
    """Whether every action that was asked for has arrived."""
    return self._asked and not self._unanswered

  def start(self) -> None:
    """Recovers the rows an older generation left, resets every environment and asks to act."""
    self._table['generation'][:] = self._generation
    self._table['waiting'][:] = NOT_WAITING
    for i in range(len(self._envs)):
      self._requeue(i)
      self._open_row(i, self._decorrelate(i, self._reset(i)), first=True)

  def request(self) -> None:
    """Asks the inference server for the actions of the streams that have a row."""
    self._tick += 1
    self._asked = True
    self._active = np.array([i for i in range(len(self._envs)) if i not in self._held])
    self._table['row'][:] = self._rows
    self._table['slot'][:] = self._slots
    self._table['waiting'][:] = NOT_WAITING
    self._table['waiting'][self._active] = self._policies[self._active]
    self._unanswered = len(self._active)
    for policy in np.unique(self._policies[self._active]):
      self._put(
        self._requests, self._worker, self._generation, self._index, int(policy), self._tick
      )

  def receive(self, tick: int, served: int) -> None:
    """Notes that `served` streams were answered; answers to older requests are ignored."""
    if tick == self._tick:
      self._unanswered -= served

  def open_held_rows(self) -> bool:
    """Opens the rows that have become free; returns whether none is missing any more."""
    for i, (obs, first) in list(self._held.items()):
      if self._row_is_free(self._rows[i]):
        del self._held[i]
        self._open_row(i, obs, first=first)
    return not self._held

  def step(self) -> None:
    """Steps the environments whose actions arrived."""
    table, slab, active = self._table, self._slab, self._active
    self._asked = False
    self._check_replies()
    rows, slots, actions = self._rows[active], self._slots[active], table['reply_action'][active]
    slab['actions'][rows, slots] = actions
    if 'behaviour_params' in slab:
      slab['behaviour_params'][rows, slots] = table['reply_params'][active]
    slab['behaviour_log_prob'][rows, slots] = table['reply_log_prob'][active]
    slab['behaviour_value'][rows, slots] = table['reply_value'][active]
    slab['version'][rows, slots] = table['reply_version'][active]
    slab['learner_version'][rows, slots] = table['reply_learner_version'][active]
    slab['played'][rows, slots] = True
    table['core'][active] = table['reply_core'][active]
    table['step'][active] += 1
    # The outcome of a slot must be in its row before `_advance` may queue that row.
    results = [
      self._envs[i].step(action)
      for i, action in zip(active.tolist(), self._decode(actions), strict=True)
    ]
    rewards = np.array([result[1] for result in results], np.float32)
    self._returns[active] += rewards
    self._tics[active] += [result[4]['tics'] for result in results]
    slab['rewards'][rows, slots] = rewards * self._reward_scale
    slab['terminated'][rows, slots] = [result[2] for result in results]
    for i, (obs, _, terminated, truncated, _) in zip(active.tolist(), results, strict=True):
      if terminated or truncated:
        self._end_episode(i, obs, terminated=terminated)
      else:
        self._advance(i, self._observed(obs), first=False)

  def close(self) -> None:
    """Closes every environment."""
    for env in self._envs:
      env.close()

  def _check_replies(self) -> None:
    table, active = self._table, self._active
    foreign = (table['reply_generation'] != self._generation) | (table['reply_tick'] != self._tick)
    foreign = active[foreign[active]]
    if len(foreign):
      raise RuntimeError(
        f'worker {self._worker} split {self._index}: the mailboxes of streams '
        f'{self._streams[foreign].tolist()} do not answer tick {self._tick} of generation '
        f'{self._generation}'
      )

  def _end_episode(self, i: int, obs: np.ndarray, *, terminated: bool) -> None:
    if not self._begun_at_random[i]:
      self._on_episode(
        int(self._streams[i]),
        int(self._policies[i]),
        not terminated,
        int(self._table['step'][i]),
        int(self._tics[i]),
        float(self._returns[i]),
      )
    self._begun_at_random[i] = False
    if terminated:
      self._advance(i, self._reset(i), first=True)
    elif self._advance(i, self._observed(obs), first=False, final=True):
      self._open_row(i, self._reset(i), first=True)
    else:
      self._fill_unplayed(i)
      self._advance(i, self._reset(i), first=True)

  def _decorrelate(self, i: int, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    # They depend on nothing but the stream's identity.
    identity = (self._seed, int(self._streams[i]))
    rng = np.random.default_rng(np.random.SeedSequence(identity, spawn_key=(1,)))
    for _ in range(self._random_starts[i]):
      action = random_action(self._spec.action, rng, obs.get(MASK))
      (member,) = self._decode(action[None])
      step_obs, _, terminated, truncated, _ = self._envs[i].step(member)
      obs = self._reset(i) if terminated or truncated else self._observed(step_obs)
      self._begun_at_random[i] = not (terminated or truncated)
    return obs

  def _observed(self, obs: Any) -> dict[str, np.ndarray]:
    """What an environment observed, by key, and under `MASK` what it allows, if it says so."""
    arrays, mask = split_obs(self._spec, obs)
    return arrays if mask is None else arrays | {MASK: mask}

  def _reset(self, i: int) -> dict[str, np.ndarray]:
    table = self._table
    table['episode'][i] += 1
    table['step'][i] = 0
    self._returns[i] = 0.0
    self._tics[i] = 0
    stream = int(self._streams[i])
    obs, _ = self._envs[i].reset(seed=episode_seed(self._seed, stream, int(table['episode'][i])))
    return self._observed(obs)

  def _advance(
    self, i: int, obs: dict[str, np.ndarray], *, first: bool, final: bool = False
  ) -> bool:
    """Writes the observation after the present slot; returns whether that completed the row.

    The observation also opens the next row, unless it is the `final` one of a truncated episode.
    """
    row, slot = self._rows[i], self._slots[i] + 1
    for key, array in self._obs.items():
      array[row, slot] = obs[key]
    self._slab['first'][row, slot] = first
    self._slots[i] = slot
    if slot < self._topology.rollout:
      if self._spec.mask_size:
        self._slab[MASK][row, slot] = obs[MASK]
      return False
    self._queue_row(i)
    if not final:
      self._open_row(i, obs, first=first)
    return True

  def _fill_unplayed(self, i: int) -> None:
    at = self._rows[i], self._slots[i]
    numbers = ('actions', 'behaviour_log_prob', 'behaviour_value', 'rewards')
    for name in (*numbers, 'version', 'learner_version'):
      self._slab[name][at] = 0
    if 'behaviour_params' in self._slab:
      self._slab['behaviour_params'][at] = 0
    if self._spec.mask_size:
      self._slab[MASK][at] = True
    self._slab['terminated'][at] = False
    self._slab['played'][at] = False

  def _row_is_free(self, row: int) -> bool:
    return self._slab['queued'][row] == self._slab['released'][row]

  def _queue_row(self, i: int) -> None:
    """Hands the row to the batcher and makes the stream's next row the present one."""
    row = int(self._rows[i])
    serial = int(self._slab['queued'][row]) + 1
    self._slab['queued'][row] = serial
    self._put(self._trajectories, row, serial)
    first_row = int(self._streams[i]) * self._topology.rows_per_stream
    self._rows[i] = first_row + (row - first_row + 1) % self._topology.rows_per_stream

  def _requeue(self, i: int) -> None:
    """Repeats the record of rows still queued: the process that put it may have died at it."""
    first_row = int(self._streams[i]) * self._topology.rows_per_stream
    for row in range(first_row, first_row + self._topology.rows_per_stream):
      if not self._row_is_free(row):
        self._put(self._trajectories, row, int(self._slab['queued'][row]))

  def _open_row(self, i: int, obs: dict[str, np.ndarray], *, first: bool) -> None:
    """Starts the stream's present row with `obs`, now or as soon as the row is free."""
    row = self._rows[i]
    if not self._row_is_free(row):
      self._held[i] = ({key: np.array(value) for key, value in obs.items()}, first)
      return
    for key, array in self._obs.items():
      array[row, 0] = obs[key]
    if self._spec.mask_size:
      self._slab[MASK][row, 0] = obs[MASK]
    self._slab['first'][row, 0] = first
    self._slab['core'][row] = self._table['core'][i]
    self._slab['policy'][row] = self._policies[i]
    self._slab['generation'][row] = self._generation
    self._slots[i] = 0

  def _put(self, queue: RecordQueue, *values: int) -> None:
    if not queue.put(*values):
      raise RuntimeError(f'worker {self._worker}: a queue is full, which its capacity rules out')
