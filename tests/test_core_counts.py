"""A core that counts: the same counts when acting and when learning, wherever episodes end."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.inference.server import Answer
from tests.fakes import (
  CORE_SIZE,
  TERMINATED,
  TRUNCATED,
  FakeEnv,
  FakePolicies,
  make_server,
  make_split,
  make_transport,
  take_rows,
)


class CountingCore(nn.Module):
  """h = h + 1, from 0 where an episode starts; the contract of `sfjax.models.cores.GRU`."""

  @nn.compact
  def __call__(self, features, core, first):
    del features

    def step(core, first):
      core = jnp.where(first[:, None], 0.0, core) + 1.0
      return core, core

    core, outputs = jax.lax.scan(step, core, first)
    return outputs, core


@jax.jit
def unroll(core, first):
  return CountingCore().apply({}, None, core, first)


def count(core, first):
  outputs, core = unroll(core, first)  # pyright: ignore[reportGeneralTypeIssues]
  return np.asarray(outputs), np.asarray(core)


class CountingPolicies(FakePolicies):
  """Acts with the counting core; the value of an observation is its count."""

  def act(self, policy, buffer, n, bucket):
    del policy, bucket
    outputs, core = count(buffer['core'][:n], buffer['first'][None, :n])
    zeros = np.zeros(n, np.float32)
    action = np.zeros((n, 1), np.int32)
    return Answer(action, zeros, outputs[0, :, 0], core, np.zeros((n, 4), np.float32), 1)


@pytest.mark.parametrize('rollout', (1, 2, 3, 5))
def test_the_learner_counts_as_the_server_did(rollout):
  """Catches a core stored one step late or early, a reset missed, or one that leaks into a row."""
  lengths = sorted({1, max(rollout - 1, 1), rollout, rollout + 1, 2 * rollout + 1})
  parts = list(itertools.product(lengths, (TERMINATED, TRUNCATED)))
  rng = np.random.default_rng(rollout)
  scripts = [
    (*pair, *(parts[k] for k in rng.integers(len(parts), size=200)))
    for pair in itertools.product(parts, repeat=2)
  ]
  transport = make_transport(envs=len(scripts), rollout=rollout)
  envs = [FakeEnv(stream, script) for stream, script in enumerate(scripts)]
  server = make_server(transport, CountingPolicies(transport.topology))
  split = make_split(transport, envs)
  split.start()
  compared = 0
  for _ in range(8 * rollout + 10):
    split.request()
    server.turn()
    for reply in transport.replies[0].get_all():
      split.receive(int(reply['tick']), int(reply['served']))
    split.step()
    for row in itertools.chain.from_iterable(take_rows(transport).values()):
      assert row['core'].shape == (CORE_SIZE,)
      outputs, _ = count(row['core'][None], row['first'][:, None])
      played = row['played']
      np.testing.assert_array_equal(outputs[:-1, 0, 0][played], row['behaviour_value'][played])
      compared += int(played.sum())
    split.open_held_rows()
  assert compared > 100
  assert max(len(episode.actions) for env in envs for episode in env.episodes) > rollout
