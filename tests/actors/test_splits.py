"""Splits: rows hold what the environments said, rows have one owner, answers are checked."""

import itertools

import numpy as np
import pytest

from sfjax.actors.splits import Split, episode_seed
from tests.fakes import (
  BOTH,
  TERMINATED,
  TRUNCATED,
  FakeEnv,
  FakeServer,
  Transport,
  assert_rows,
  expected_rows,
  make_split,
  make_transport,
  take_rows,
)

ENDS = (TERMINATED, TRUNCATED, BOTH)
ENDLESS = (10**9, TERMINATED)


def play(transport: Transport, split: Split, turns: int) -> dict[int, list[dict[str, np.ndarray]]]:
  """Starts a split, steps it and returns its rows by stream."""
  server = FakeServer(transport)
  rows = {stream: [] for stream in range(transport.topology.num_streams)}
  split.start()
  for _ in range(turns):
    split.request()
    server.serve(split)
    split.step()
    for stream, new in take_rows(transport).items():
      rows[stream] += new
    split.open_held_rows()
  return rows


def check(rows: dict[int, list[dict[str, np.ndarray]]], envs: list[FakeEnv], rollout: int) -> None:
  for stream, env in enumerate(envs):
    expected = expected_rows(env.episodes, rollout)
    assert len(rows[stream]) == len(expected)
    assert_rows(rows[stream], expected)


@pytest.mark.parametrize('rollout', (1, 2, 3))
def test_an_end_at_any_slot_after_an_end_at_any_slot_leaves_each_fact_in_its_place(rollout):
  """Catches a final observation lost, doubled, played or opening the next row; a wrong `first`.

  Two episodes of every length up to T + 1 and every kind of end, then one that goes on.
  """
  parts = itertools.product(range(1, rollout + 2), ENDS)
  scripts = [(*pair, ENDLESS) for pair in itertools.product(list(parts), repeat=2)]
  transport = make_transport(envs=len(scripts), rollout=rollout)
  envs = [FakeEnv(stream, script) for stream, script in enumerate(scripts)]
  rows = play(transport, make_split(transport, envs), 4 * rollout + 5)
  assert all(len(of_stream) >= 4 for of_stream in rows.values())
  check(rows, envs, rollout)


@pytest.mark.parametrize('same_array', (False, True))
@pytest.mark.parametrize(('rollout', 'rows_per_stream'), ((1, 1), (4, 2), (5, 3), (8, 1)))
def test_rows_of_long_histories_reproduce_the_episodes(rollout, rows_per_stream, same_array):
  """Catches a kept reference to an array that the environment writes again, and a lost core."""
  rng = np.random.default_rng(rollout)
  lengths = np.array((1, max(rollout - 1, 1), rollout, rollout + 1, 2 * rollout, 3 * rollout + 1))
  scripts = [
    zip(rng.choice(lengths, 200).tolist(), rng.choice(ENDS, 200).tolist(), strict=True)
    for _ in range(4)
  ]
  transport = make_transport(envs=4, rows=rows_per_stream, rollout=rollout)
  envs = [FakeEnv(i, script, same_array=same_array) for i, script in enumerate(scripts)]
  check(play(transport, make_split(transport, envs), 150), envs, rollout)


def test_what_is_told_of_an_episode_is_raw_and_whole():
  """Catches scaled or lost rewards in returns, counts that restart with a row, a wrong flag."""
  transport, episodes = make_transport(rollout=2), []
  env = FakeEnv(0, [(5, TERMINATED), (1, TRUNCATED), (2, BOTH), ENDLESS])
  split = make_split(transport, [env], reward_scale=0.25, episodes=episodes)
  rows = play(transport, split, 12)
  assert episodes == [
    (0, 0, truncated, length, 3 * length, sum(env.episodes[i].rewards))
    for i, (length, truncated) in enumerate(((5, False), (1, True), (2, False)))
  ]
  assert episodes[0][-1] != 0
  assert_rows(rows[0], expected_rows(env.episodes, 2), reward_scale=0.25)


def test_rows_that_nobody_releases_are_not_written_again():
  """Catches a full stream that goes on over its oldest row, or one that never gets going again."""
  transport = make_transport(envs=2, rows=2, rollout=3)
  # Stream 1 needs rows faster: its truncated episodes take slots.
  envs = [FakeEnv(0, [ENDLESS]), FakeEnv(1, [(1, TRUNCATED)] * 9 + [ENDLESS])]
  split, server = make_split(transport, envs), FakeServer(transport)
  split.start()
  while not split.waits_for_rows:
    split.request()
    server.serve(split)
    split.step()
  assert transport.slab['queued'].tolist() == [1, 0, 1, 1]
  queued = {name: array[[0, 2, 3]].copy() for name, array in transport.slab.items()}
  assert not split.open_held_rows()
  assert split.waits_for_rows
  for name, array in queued.items():
    np.testing.assert_array_equal(transport.slab[name][[0, 2, 3]], array, name)
  rows = take_rows(transport)
  assert split.open_held_rows()
  for _ in range(9):
    split.request()
    server.serve(split)
    split.step()
    for stream, new in take_rows(transport).items():
      rows[stream] += new
    split.open_held_rows()
  check(rows, envs, 3)


def test_a_row_opens_only_when_its_own_release_has_come():
  """Catches the release of one row taken for that of another."""
  transport = make_transport(envs=2, rows=1, rollout=1)
  split = make_split(transport, [FakeEnv(i, [ENDLESS]) for i in range(2)])
  server = FakeServer(transport)
  split.start()
  split.request()
  server.serve(split)
  split.step()
  transport.slab['released'][1] = 1
  assert not split.open_held_rows()
  assert transport.slab['obs/obs'][:, 0].tolist() == [[0, 0, 0], [1, 0, 1]]
  transport.slab['released'][0] = 1
  assert split.open_held_rows()


def test_an_observation_that_waits_for_its_row_is_the_splits_own():
  """Catches a kept reference: an environment may write its array whenever it likes."""
  transport = make_transport(rows=1, rollout=1)
  env = FakeEnv(0, [ENDLESS], same_array=True)
  split = make_split(transport, [env])
  split.start()
  split.request()
  FakeServer(transport).serve(split)
  split.step()
  array, _, _, _, _ = env.step(0)
  array.fill(77)
  take_rows(transport)
  assert split.open_held_rows()
  assert transport.slab['obs/obs'][0, 0].tolist() == [0, 0, 1]


def test_an_answer_to_another_request_is_not_acted_on():
  """Catches a missing look at the tick, at either end of it, or at the generation."""
  transport = make_transport(envs=2)
  split = make_split(transport, [FakeEnv(i, [ENDLESS]) for i in range(2)], generation=3)
  split.start()
  split.request()
  (request,) = transport.requests.get_all()
  for tick in (0, 2):
    split.receive(tick, 2)
  assert split.waits_for_actions
  FakeServer(transport).answer(request)
  split.receive(1, 1)
  assert split.waits_for_actions
  split.receive(1, 1)
  assert not split.waits_for_actions
  for name in ('reply_tick', 'reply_generation'):
    transport.streams[name][1] += 1
    with pytest.raises(RuntimeError, match=r'streams \[1\] do not answer tick 1 of generation 3'):
      split.step()
    transport.streams[name][1] -= 1
  split.step()


def test_a_split_of_two_policies_waits_for_both():
  """Catches one request for all streams, and a step when the first of two answers is there."""
  transport = make_transport(envs=3)
  split = make_split(transport, [FakeEnv(i, [ENDLESS]) for i in range(3)], num_policies=2)
  split.start()
  split.request()
  requests = transport.requests.get_all()
  assert requests['policy'].tolist() == [0, 1]
  server = FakeServer(transport)
  served = [server.answer(request) for request in requests]
  assert served == [2, 1]
  split.receive(1, served[1])
  assert split.waits_for_actions
  split.receive(1, served[0])
  assert not split.waits_for_actions
  assert transport.slab['policy'][::2].tolist() == [0, 1, 0]


def crashed(rows_queued: int, *, rows: int = 2) -> tuple[Transport, FakeEnv]:
  """What a worker of one stream leaves when it dies with a row half full."""
  transport = make_transport(rows=rows, rollout=3)
  env = FakeEnv(0, [ENDLESS])
  split, server = make_split(transport, [env]), FakeServer(transport)
  split.start()
  for _ in range(3 * rows_queued + 2):
    split.request()
    server.serve(split)
    split.step()
  split.request()
  return transport, env


def test_rows_queued_before_a_restart_are_told_again_and_waited_for():
  """Catches a new generation that fills rows the batcher has not read, or loses their records."""
  transport, old_env = crashed(1)
  transport.requests.get_all()
  assert transport.trajectories.get_all().tolist() == [(0, 1)]  # Lost, say.
  old_row = {name: array[0].copy() for name, array in transport.slab.items()}
  env = FakeEnv(0, [ENDLESS], generation=1)
  split = make_split(transport, [env], generation=1)
  split.start()
  assert split.waits_for_rows
  assert transport.trajectories.get_all().tolist() == [(0, 1)]
  for name, array in old_row.items():
    np.testing.assert_array_equal(transport.slab[name][0], array, name)
  assert_rows([old_row], expected_rows(old_env.episodes, 3))
  assert transport.slab['generation'][0] == 0
  transport.slab['released'][0] = 1
  assert split.open_held_rows()
  server, rows = FakeServer(transport), []
  for _ in range(10):
    split.request()
    server.serve(split)
    split.step()
    rows += take_rows(transport)[0]
  assert [row['generation'] for row in rows] == [1, 1, 1]
  assert_rows(rows, expected_rows(env.episodes, 3))


def test_a_restart_takes_over_half_filled_and_free_rows_at_once():
  """Catches a new generation that waits for ever for a row which nobody will queue."""
  transport, _ = crashed(1)
  take_rows(transport)
  split = make_split(transport, [FakeEnv(0, [ENDLESS])], generation=1)
  split.start()
  assert not split.waits_for_rows
  assert len(transport.trajectories.get_all()) == 0


def test_a_mailbox_filled_for_the_generation_before_is_refused():
  """Catches a first tick that an older generation's first answer fits."""
  transport = make_transport()
  for generation in (0, 1):
    split = make_split(transport, [FakeEnv(0, [ENDLESS])], generation=generation)
    split.start()
    split.request()
    if generation == 0:
      FakeServer(transport).serve(split)
  split.receive(1, 1)
  with pytest.raises(RuntimeError, match='do not answer tick 1 of generation 1'):
    split.step()


def test_an_episode_is_seeded_and_numbered_by_its_identity_also_after_a_restart():
  """Catches seeds by call order, equal seeds of two streams, and identities used twice."""
  transport, seeds = make_transport(envs=2, rollout=2), {}
  for generation in (0, 1):
    envs = [FakeEnv(stream, [(2, TERMINATED), (1, TRUNCATED), ENDLESS]) for stream in range(2)]
    play(transport, make_split(transport, envs, generation=generation, seed=5), 4)
    for env_stream, env in enumerate(envs):
      for i, episode in enumerate(env.episodes):
        seeds[env_stream, 3 * generation + i + 1] = episode.seed
  assert seeds == {(s, e): episode_seed(5, s, e) for s in range(2) for e in range(1, 7)}
  assert len(set(seeds.values())) == 12
  # Stream 1 is one action into its present episode.
  assert transport.streams['step'].tolist() == [1, 1]


def test_a_full_queue_is_an_error_and_not_a_lost_row():
  transport = make_transport()
  while transport.requests.put(0, 0, 0, 0, 0):
    pass
  split = make_split(transport, [FakeEnv(0, [ENDLESS])])
  split.start()
  with pytest.raises(RuntimeError, match='worker 0: a queue is full'):
    split.request()
