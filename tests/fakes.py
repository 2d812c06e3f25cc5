"""Stand-ins for the neighbours of a part of the transport, in one process and free of jax."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sfjax.actors.splits import Env, Split
from sfjax.inference.server import Answer, Arrays, Server, batch_specs
from sfjax.metrics.stages import StageTimer, status_specs
from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import REPLY, REQUEST, TRAJECTORY, Topology, slab_specs, stream_specs
from sfjax.specs import ArraySpec, EnvSpec, array_spec, discrete

ENV = EnvSpec(obs={'obs': array_spec(np.float32, 3)}, action=discrete(4))
CORE_SIZE = 2
LEARNER_AHEAD = 5  # Versions that `FakeServer` says the learner is ahead of its answers.

TERMINATED, TRUNCATED, BOTH = 'terminated', 'truncated', 'both'


def zeros(specs: dict[str, ArraySpec]) -> Arrays:
  """Arrays of a block, without the block."""
  return {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}


def only_writable(arrays: Arrays, *names: str) -> Arrays:
  """Views of `arrays` that refuse to be written but for those of `names`."""
  views = {name: array.view() for name, array in arrays.items()}
  for name, view in views.items():
    view.flags.writeable = name in names
  return views


class Transport(NamedTuple):
  """What the processes of a run share."""

  topology: Topology
  slab: Arrays
  streams: Arrays
  requests: RecordQueue
  trajectories: RecordQueue
  replies: list[RecordQueue]


def make_transport(
  *,
  workers: int = 1,
  envs: int | tuple[int, ...] = 1,
  splits: int = 1,
  rows: int = 2,
  rollout: int = 4,
) -> Transport:
  """Allocates what the processes of a run share; `envs`: of every worker, or of each."""
  topology = Topology(
    worker_envs=(envs,) * workers if isinstance(envs, int) else envs,
    num_splits=splits,
    rows_per_stream=rows,
    rollout=rollout,
  )
  return Transport(
    topology,
    zeros(slab_specs(topology, ENV, CORE_SIZE, behaviour_params=True)),
    zeros(stream_specs(topology, ENV, CORE_SIZE, behaviour_params=True)),
    RecordQueue(REQUEST, 1000),
    RecordQueue(TRAJECTORY, 1000),
    [RecordQueue(REPLY, 1000) for _ in range(topology.num_workers)],
  )


@dataclass
class Episode:
  """What an environment said in one episode: one observation more than actions."""

  seed: int
  obs: list[np.ndarray]
  actions: list[int] = field(default_factory=list)
  rewards: list[float] = field(default_factory=list)
  end: str | None = None


class FakeEnv:
  """Plays episodes of given lengths and ends, and keeps what it said.

  An observation is (stream, generation, how many this environment gave before): all are different.
  """

  def __init__(
    self,
    stream: int,
    script: Iterable[tuple[int, str]],
    *,
    generation: int = 0,
    same_array: bool = False,
  ) -> None:
    self.episodes: list[Episode] = []
    self.closed = False
    self._script: Iterator[tuple[int, str]] = iter(script)
    self._obs = np.array([stream, generation, -1], np.float32)
    self._same_array = same_array
    self._length, self._end = 0, ''

  def reset(self, *, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    self._length, self._end = next(self._script)
    obs = self._say()
    self.episodes.append(Episode(seed, [obs.copy()]))
    return obs, {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    episode = self.episodes[-1]
    assert episode.end is None, 'stepped beyond an end'
    obs, reward = self._say(), float(action % 11 - 5)
    episode.obs.append(obs.copy())
    episode.actions.append(action)
    episode.rewards.append(reward)
    if len(episode.actions) == self._length:
      episode.end = self._end
    terminated, truncated = episode.end in (TERMINATED, BOTH), episode.end in (TRUNCATED, BOTH)
    return obs, reward, terminated, truncated, {'tics': 3}

  def close(self) -> None:
    self.closed = True

  def _say(self) -> np.ndarray:
    if not self._same_array:
      self._obs = self._obs.copy()
    self._obs[2] += 1
    return self._obs


class Slot(NamedTuple):
  """One slot as it should stand in a row; `action` is None where none was taken (yet)."""

  obs: np.ndarray
  first: bool
  action: int | None = None
  reward: float = 0.0
  terminated: bool = False
  final: bool = False


def expected_rows(episodes: Sequence[Episode], rollout: int) -> list[list[Slot]]:
  """Cuts what an environment said into rows of `rollout` + 1 slots, from the rules alone."""
  slots = []
  for episode in episodes:
    last = len(episode.actions) - 1
    for t, (action, reward) in enumerate(zip(episode.actions, episode.rewards, strict=True)):
      terminated = t == last and episode.end in (TERMINATED, BOTH)
      slots.append(Slot(episode.obs[t], t == 0, action, reward, terminated))
    if episode.end == TRUNCATED:
      slots.append(Slot(episode.obs[-1], False, final=True))
    elif episode.end is None:
      slots.append(Slot(episode.obs[-1], not episode.actions))
  rows = []
  while len(slots) > rollout:
    rows.append(slots[: rollout + 1])
    # Slot T opens the next row, but not when it is the end of the episode before.
    del slots[: rollout + 1 if slots[rollout].final else rollout]
  return rows


def numbered_answer(version: int, streams: np.ndarray) -> Answer:
  """Answers to `streams` of which every part follows from the action: nothing can be mixed up."""
  action = np.arange(len(streams), dtype=np.int32) + 1000 * version
  core = np.stack([action, streams], axis=1).astype(np.float32)
  params = np.outer(action, np.arange(1, 5)).astype(np.float32)
  return Answer(
    action[:, None], -action.astype(np.float32), action * np.float32(0.5), core, params, version
  )


class Call(NamedTuple):
  """What a policy was asked."""

  policy: int
  batch: Arrays
  n: int
  bucket: int


class FakePolicies:
  """Policies with numbered answers, which note what they are asked; buffers come poisoned."""

  def __init__(self, topology: Topology) -> None:
    self.calls: list[Call] = []
    self.refreshed: list[int] = []
    self.during_act = lambda: None
    self._specs = batch_specs(topology, ENV, CORE_SIZE)

  def refresh(self, policy: int) -> None:
    self.refreshed.append(policy)

  def buffer(self) -> Arrays:
    buffer = zeros(self._specs)
    for array in buffer.values():
      array.fill(np.nan if array.dtype == np.float32 else -1)
    return buffer

  def act(self, policy: int, buffer: Arrays, n: int, bucket: int) -> Answer:
    batch = {name: array[:n].copy() for name, array in buffer.items()}
    self.calls.append(Call(policy, batch, n, bucket))
    self.during_act()
    return numbered_answer(len(self.calls), batch['identity'][:, 2])


class FakeServer:
  """Answers single requests with numbered answers, written as the rules say."""

  def __init__(self, transport: Transport) -> None:
    self._transport = transport
    self._version = 0

  def answer(self, request: Any) -> int:
    """Fills the mailboxes of the streams a request means; returns how many these are."""
    self._version += 1
    table = self._transport.streams
    part = self._transport.topology.streams_of(int(request['worker']), int(request['split']))
    streams = np.arange(part.start, part.stop)
    streams = streams[table['waiting'][streams] == request['policy']]
    for name, value in numbered_answer(self._version, streams)._asdict().items():
      table[f'reply_{name}'][streams] = value
    table['reply_learner_version'][streams] = self._version + LEARNER_AHEAD
    table['reply_generation'][streams] = request['generation']
    table['reply_tick'][streams] = request['tick']
    return len(streams)

  def serve(self, *splits: Split) -> None:
    """Answers all requests, which are those of `splits`."""
    for request in self._transport.requests.get_all():
      split = splits[request['split']]
      split.receive(int(request['tick']), self.answer(request))


class FakeOutput:
  """An output of a device program that is ready when told."""

  def __init__(self, *, ready: bool = False) -> None:
    self.ready = ready

  def is_ready(self) -> bool:
    return self.ready


def take_rows(transport: Transport, *, release: bool = True) -> dict[int, list[Arrays]]:
  """Copies the rows that were queued, by stream, and releases them."""
  rows = {stream: [] for stream in range(transport.topology.num_streams)}
  for row in transport.trajectories.get_all()['row'].tolist():
    copy = {name: array[row].copy() for name, array in transport.slab.items()}
    rows[transport.topology.stream_of_row(row)].append(copy)
    if release:
      transport.slab['released'][row] = transport.slab['queued'][row]
  return rows


def assert_rows(
  rows: Sequence[Arrays],
  expected: Sequence[list[Slot]],
  *,
  reward_scale: float = 1.0,
  learner_ahead: int = LEARNER_AHEAD,
) -> None:
  """Checks the first rows of a stream against what its environment said, all fields."""
  before = None
  for row, slots in zip(rows, expected, strict=False):
    np.testing.assert_array_equal(row['obs/obs'], [slot.obs for slot in slots])
    np.testing.assert_array_equal(row['first'], [slot.first for slot in slots])
    steps = slots[:-1]
    actions = np.array([slot.action or 0 for slot in steps])
    np.testing.assert_array_equal(row['played'], [slot.action is not None for slot in steps])
    np.testing.assert_array_equal(row['actions'][:, 0], actions)
    np.testing.assert_array_equal(row['behaviour_params'], np.outer(actions, np.arange(1, 5)))
    np.testing.assert_array_equal(row['behaviour_log_prob'], -actions)
    np.testing.assert_array_equal(row['behaviour_value'], actions * 0.5)
    np.testing.assert_array_equal(row['version'], actions // 1000)
    newest = actions // 1000 + learner_ahead * row['played']
    np.testing.assert_array_equal(row['learner_version'], newest)
    np.testing.assert_array_equal(row['rewards'], [slot.reward * reward_scale for slot in steps])
    np.testing.assert_array_equal(row['terminated'], [slot.terminated for slot in steps])
    if not slots[0].first:
      assert before is not None
      np.testing.assert_array_equal(row['core'], [before.action, slots[0].obs[0]])
    before = steps[-1]


def make_split(
  transport: Transport,
  envs: Sequence[Env],
  *,
  worker: int = 0,
  index: int = 0,
  generation: int = 0,
  num_policies: int = 1,
  reward_scale: float = 1.0,
  seed: int = 0,
  episodes: list[tuple] | None = None,
) -> Split:
  """A split of `transport` around `envs`; finished episodes are appended to `episodes`."""
  told = [] if episodes is None else episodes
  slab_of_worker = (name for name in transport.slab if name != 'released')
  table_of_worker = (name for name in transport.streams if not name.startswith('reply_'))
  return Split(
    worker=worker,
    generation=generation,
    index=index,
    envs=envs,
    spec=ENV,
    decode=lambda actions: actions[:, 0].tolist(),
    topology=transport.topology,
    slab=only_writable(transport.slab, *slab_of_worker),
    streams=only_writable(transport.streams, *table_of_worker),
    requests=transport.requests,
    trajectories=transport.trajectories,
    on_episode=lambda *episode: told.append(episode),
    num_policies=num_policies,
    seed=seed,
    reward_scale=reward_scale,
  )


def make_server(
  transport: Transport,
  policies: FakePolicies,
  *,
  num_policies: int = 1,
  learner_versions: np.ndarray | None = None,
) -> Server:
  """The inference server of `transport` around `policies`."""
  if learner_versions is None:
    learner_versions = np.zeros(num_policies, np.int64)
  mailbox = (name for name in transport.streams if name.startswith('reply_'))
  return Server(
    policies=policies,
    num_policies=num_policies,
    topology=transport.topology,
    slab=only_writable(transport.slab),
    streams=only_writable(transport.streams, *mailbox),
    requests=transport.requests,
    replies=transport.replies,
    timer=make_timer(transport),
    acted=np.zeros(1, np.int64),
    learner_versions=learner_versions,
    seed=0,
  )


def make_timer(transport: Transport) -> StageTimer:
  """A timer that nobody reads."""
  return StageTimer(zeros(status_specs(transport.topology, 1)), 0)
