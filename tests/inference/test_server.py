"""The inference server: the right answers in the right mailboxes, and nothing elsewhere."""

import numpy as np
import pytest

from sfjax.actors.splits import Split
from sfjax.inference.batching import bucket_sizes
from sfjax.inference.server import Arrays
from sfjax.shm.slab import NOT_WAITING
from tests.fakes import (
  TERMINATED,
  FakeEnv,
  FakePolicies,
  Transport,
  make_server,
  make_split,
  make_transport,
)

ENDLESS = (10**9, TERMINATED)


def waiting_transport(*, workers: int = 3, envs: int = 4, num_policies: int = 1) -> Transport:
  """Streams of two splits a worker that all wait; each fact of each stream is different."""
  transport = make_transport(workers=workers, envs=envs, splits=2, rows=2, rollout=3)
  rng, table, slab = np.random.default_rng(0), transport.streams, transport.slab
  n = transport.topology.num_streams
  streams = np.arange(n)
  table['waiting'][:] = streams % num_policies
  table['generation'][:] = 2
  table['row'][:] = 2 * streams + rng.integers(0, 2, n)
  table['slot'][:] = rng.integers(0, 3, n)
  for name, start in (('episode', 100), ('step', 200)):
    table[name][:] = start + streams
  table['core'][:] = rng.normal(size=table['core'].shape)
  slab['obs/obs'][:] = rng.normal(size=slab['obs/obs'].shape)
  slab['first'][:] = rng.random(slab['first'].shape) < 0.5
  return transport


def ask(transport: Transport, *requests: tuple[int, int], policy: int = 0, tick: int = 7) -> None:
  for worker, split in requests:
    transport.requests.put(worker, 2, split, policy, tick + worker)


def snapshot(arrays: Arrays) -> Arrays:
  return {name: array.copy() for name, array in arrays.items()}


def check_answers(
  transport: Transport, policies: FakePolicies, before: Arrays, streams: list[int]
) -> None:
  """Checks the one call to `policies`: what it saw, and that its answers are where they belong."""
  (call,) = policies.calls
  table, slab = transport.streams, transport.slab
  assert sorted(call.batch['identity'][:, 2].tolist()) == streams
  for place, stream in enumerate(call.batch['identity'][:, 2].tolist()):
    at = table['row'][stream], table['slot'][stream]
    np.testing.assert_array_equal(call.batch['obs/obs'][place], slab['obs/obs'][at])
    assert call.batch['first'][place] == slab['first'][at]
    np.testing.assert_array_equal(call.batch['core'][place], table['core'][stream])
    assert table['reply_action'][stream] == 1000 + place
    assert table['reply_log_prob'][stream] == -1000 - place
    assert table['reply_value'][stream] == 500 + place / 2
    assert table['reply_core'][stream].tolist() == [1000 + place, stream]
    assert table['reply_version'][stream] == table['reply_learner_version'][stream] == 1
    assert table['reply_generation'][stream] == 2
    assert table['reply_tick'][stream] == 7 + stream // 4
  others = np.setdiff1d(np.arange(transport.topology.num_streams), streams)
  for name, array in before.items():
    np.testing.assert_array_equal(table[name][others], array[others], name)


@pytest.mark.parametrize(
  'asked',
  ([(0, 0)], [(2, 1)], [(1, 1), (0, 0), (2, 0)], [(w, s) for s in (1, 0) for w in (2, 0, 1)]),
)
def test_answers_reach_the_streams_that_asked_and_no_other(asked):
  """Catches a shifted gather or scatter, an answer to all, padding or poison that leaks."""
  transport = waiting_transport()
  policies, before = FakePolicies(transport.topology), snapshot(transport.streams)
  slab = snapshot(transport.slab)
  server = make_server(transport, policies)
  ask(transport, *asked)
  assert server.turn()
  streams = sorted(4 * w + 2 * s + i for w, s in asked for i in (0, 1))
  check_answers(transport, policies, before, streams)
  for name, array in slab.items():
    np.testing.assert_array_equal(transport.slab[name], array, name)
  for worker, queue in enumerate(transport.replies):
    told = [(2, s, 2, 7 + w) for w, s in asked if w == worker]
    assert queue.get_all().tolist() == told
  assert not server.turn()


def test_action_noise_is_keyed_by_who_acts():
  """Catches a swapped, stale or positional integer in the identity."""
  transport = waiting_transport(num_policies=2)
  policies = FakePolicies(transport.topology)
  ask(transport, (1, 1), (0, 0), policy=1)
  make_server(transport, policies, num_policies=2).turn()
  # Seed, policy, stream, episode, step; odd streams are of policy 1.
  expected = [[0, 1, 7, 107, 207], [0, 1, 1, 101, 201]]
  assert policies.calls[0].batch['identity'].tolist() == expected


def test_each_policy_answers_its_own_streams():
  """Catches answers of one policy in the mailboxes of another, and counts that mix them."""
  transport = waiting_transport(num_policies=2)
  policies = FakePolicies(transport.topology)
  server = make_server(transport, policies, num_policies=2)
  ask(transport, (0, 0), (1, 0), policy=1)
  ask(transport, (1, 0), policy=0)
  assert server.turn()
  served = {call.policy: call.batch['identity'][:, 2].tolist() for call in policies.calls}
  assert served == {0: [4], 1: [1, 5]}
  assert transport.streams['reply_version'].tolist() == [0, 2, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0]
  assert transport.replies[0].get_all()['served'].tolist() == [1]
  assert transport.replies[1].get_all()['served'].tolist() == [1, 1]


def test_the_learners_version_is_that_of_the_answer():
  """Catches a version from before the step, another policy's, and one below that which acted."""
  transport = waiting_transport(num_policies=2)
  policies, learner_versions = FakePolicies(transport.topology), np.array([3, 0])
  server = make_server(transport, policies, num_policies=2, learner_versions=learner_versions)

  def learn() -> None:
    learner_versions[0] += 40  # While the policy acts; policy 1 is published, not yet counted.

  policies.during_act = learn
  ask(transport, (0, 0), policy=0)
  ask(transport, (0, 0), policy=1)
  server.turn()
  # Streams 0 and 1 are of policies 0 and 1; the fake policy acts as version 1, then 2.
  assert transport.streams['reply_version'][:2].tolist() == [1, 2]
  assert transport.streams['reply_learner_version'][:2].tolist() == [43, 2]


def test_a_batch_is_padded_to_a_size_that_was_compiled():
  """Catches a size of its own for each number of requests, and one that is too small."""
  for split_size, workers in ((1, 1), (2, 3), (5, 2)):
    transport = waiting_transport(workers=workers, envs=2 * split_size)
    policies = FakePolicies(transport.topology)
    server = make_server(transport, policies)
    buckets = bucket_sizes(transport.topology)
    assert buckets[-1] == transport.topology.num_streams
    for count in range(1, 2 * workers + 1):
      ask(transport, *[(i // 2, i % 2) for i in range(count)])
      server.turn()
      call = policies.calls[-1]
      assert call.n == count * split_size
      assert call.bucket == min(size for size in buckets if size >= call.n)


def test_newer_parameters_are_taken_over_before_each_batch_and_a_wake_up_is_no_request():
  """Catches a refresh of all policies at once, which misses what the first batch lasted for."""
  transport = waiting_transport(num_policies=2)
  policies = FakePolicies(transport.topology)
  server = make_server(transport, policies, num_policies=2)
  policies.during_act = lambda: seen.append(policies.refreshed.copy())
  seen: list[list[int]] = []
  transport.requests.put(-1, 0, 0, -1, 5)
  assert not server.turn()
  assert (policies.refreshed, policies.calls) == ([0, 1], [])
  assert all(len(queue.get_all()) == 0 for queue in transport.replies)
  for policy in (0, 1):
    ask(transport, (0, 0), policy=policy)
  server.turn()
  assert seen == [[0, 1, 0], [0, 1, 0, 1]]


def test_the_full_queue_of_a_dead_worker_holds_nobody_up():
  transport = waiting_transport()
  while transport.replies[0].put(0, 0, 0, 0):
    pass
  ask(transport, (0, 0), (1, 0))
  assert make_server(transport, FakePolicies(transport.topology)).turn()
  assert len(transport.replies[1].get_all()) == 1


class Restart:
  """A split of two streams whose worker dies after its request and is started again."""

  def __init__(self) -> None:
    self.transport = make_transport(envs=2)
    self.policies = FakePolicies(self.transport.topology)
    self.server = make_server(self.transport, self.policies)
    self._start(0).request()

  def _start(self, generation: int) -> Split:
    envs = [FakeEnv(i, [ENDLESS], generation=generation) for i in range(2)]
    split = make_split(self.transport, envs, generation=generation)
    split.start()
    return split

  def restart(self, *, request: bool) -> None:
    self.split = self._start(1)
    if request:
      self.split.request()

  def check_new_request_is_answered(self) -> None:
    """Receives as the worker does, by generation, then acts: the split checks the mailboxes."""
    told = self.transport.replies[0].get_all()
    assert told[told['generation'] == 1].tolist() == [(1, 0, 2, 1)]
    self.split.receive(1, 2)
    self.split.step()
    rows = self.transport.slab['obs/obs'][::2]
    assert rows[:, 0].tolist() == [[0, 1, 0], [1, 1, 0]]
    assert self.policies.calls[-1].batch['obs/obs'].tolist() == rows[:, 0].tolist()


def test_a_request_of_a_dead_generation_is_served_nothing():
  """Catches a server that answers whoever waits now: with the same tick it would be believed."""
  world = Restart()
  world.restart(request=True)
  world.server.turn()
  assert [call.n for call in world.policies.calls] == [2]
  assert world.transport.replies[0].get_all().tolist() == [(0, 0, 0, 1), (1, 0, 2, 1)]
  world.transport.replies[0].put(1, 0, 2, 1)
  world.check_new_request_is_answered()


def test_a_dead_request_before_the_new_one_touches_no_mailbox():
  """Catches a look at `waiting` alone."""
  world = Restart()
  world.restart(request=False)
  assert world.transport.streams['waiting'].tolist() == [NOT_WAITING] * 2
  before = snapshot(world.transport.streams)
  world.server.turn()
  for name, array in before.items():
    np.testing.assert_array_equal(world.transport.streams[name], array, name)
  world.split.request()
  world.server.turn()
  world.check_new_request_is_answered()


def test_an_answer_under_way_while_its_worker_is_replaced_is_not_believed():
  """Catches answers tagged with the table's generation instead of the request's."""
  world = Restart()
  world.policies.during_act = lambda: world.restart(request=True)
  world.server.turn()
  world.policies.during_act = lambda: None
  assert world.split.waits_for_actions
  assert world.transport.streams['reply_generation'].tolist() == [0, 0]
  told = world.transport.replies[0].get_all()
  assert told['generation'].tolist() == [0]
  world.split.receive(1, 2)  # Even if the worker did not look at the generation,
  with pytest.raises(RuntimeError, match='do not answer tick 1 of generation 1'):
    world.split.step()  # the split does.
  world.server.turn()
  world.check_new_request_is_answered()
