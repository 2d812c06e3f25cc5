"""The policy step: actions depend on who acts, and on nothing else of the batch."""

from typing import Any

import jax
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.inference.act import IDENTITY, ActOutput, make_act
from sfjax.inference.policies import PublishedPolicies
from sfjax.inference.server import batch_specs
from sfjax.models.actor_critic import init_params, make_model
from sfjax.models.flat_params import flat_nbytes, flatten_params
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.params import ParameterBuffer
from tests.fakes import CORE_SIZE, ENV, make_transport


def make_policy(core=config_lib.Core.GRU, *, seed=0) -> tuple[Any, Any]:
  """A network for the fake environment, with large random parameters."""
  config = config_lib.Config()
  config.model.encoder = config_lib.Encoder.MLP
  config.model.mlp_layers = (8,)
  config.model.core, config.model.core_size = core, CORE_SIZE
  model = make_model(config, ENV)
  size = config_lib.core_size(config)
  shapes = jax.eval_shape(lambda key: init_params(model, key, ENV, size), jax.random.key(0))
  rng = np.random.default_rng(seed)
  return model, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def random_batch(n: int, seed=0) -> tuple[Any, Any, Any, Any]:
  """Observations, states, starts, and identities that are all different."""
  rng = np.random.default_rng(seed)
  identity = np.stack(
    [np.zeros(n), np.zeros(n), np.arange(n), rng.integers(9, size=n), rng.integers(9, size=n)], 1
  )
  return (
    {'obs': rng.normal(size=(n, 3)).astype(np.float32)},
    rng.normal(size=(n, CORE_SIZE)).astype(np.float32),
    rng.random(n) < 0.5,
    identity.astype(np.int32),
  )


def rows(tree: Any, index: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf[index], tree)


def test_the_place_in_a_batch_and_its_padding_change_nothing():
  """Catches keys that are split by place, and rows that see each other or the padding."""
  model, params = make_policy()
  act = make_act(model, ENV.action)
  batch = random_batch(64)
  expected = act(params, *batch)
  order = np.random.default_rng(1).permutation(64)
  shuffled = act(params, *rows(batch, order))
  np.testing.assert_array_equal(shuffled.action, expected.action[order])
  padded = rows(batch, np.concatenate([np.arange(40), np.zeros(24, int)]))
  for leaf in jax.tree.leaves(padded):
    leaf[40:] = 77
  padded[3][40:] = -1
  short = rows(act(params, *padded), slice(40))
  np.testing.assert_array_equal(short.action, expected.action[:40])
  for name in ('log_prob', 'value', 'core'):
    one, other, all_ = (getattr(output, name) for output in (shuffled, short, expected))
    np.testing.assert_allclose(one, all_[order], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(other, all_[:40], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('field', IDENTITY)
def test_each_integer_of_the_identity_makes_other_noise(field):
  """Catches one that is forgotten: then all streams, or all steps of one, act alike."""
  model, params = make_policy()
  batch = random_batch(64)
  for leaf in jax.tree.leaves(batch):
    leaf[:] = leaf[:1]  # All rows are one, but for the identity.
  identity = batch[3]
  identity[:, IDENTITY.index(field)] = np.arange(64)
  actions = np.asarray(make_act(model, ENV.action)(params, *batch).action)[:, 0]
  probabilities = np.bincount(actions, minlength=4) / 64
  assert probabilities.max() < 0.95, 'every row drew the same action'
  assert probabilities.max() > 0.3


def test_swapped_integers_are_another_identity():
  """Catches keys made from a sum: step 2 of stream 1 and step 1 of stream 2 would act alike."""
  model, params = make_policy()
  batch = random_batch(64)
  for leaf in jax.tree.leaves(batch[:3]):
    leaf[:] = leaf[:1]
  rng = np.random.default_rng(0)
  batch[3][:] = rng.integers(0, 1000, (64, 5))
  act = make_act(model, ENV.action)
  one = np.asarray(act(params, *batch).action)
  batch[3][:] = batch[3][:, [0, 1, 3, 2, 4]]
  # Independent draws agree in the sum of squared probabilities, below 3/4 here; 64 draws
  # that agree more often than in 9 of 10 cases are not independent.
  assert np.mean(one == np.asarray(act(params, *batch).action)) < 0.9


def test_actions_follow_the_policy():
  """Catches noise that is correlated over neighbouring identities."""
  model, params = make_policy()
  n = 4096
  batch = random_batch(n)
  for leaf in jax.tree.leaves(batch[:3]):
    leaf[:] = leaf[:1]
  batch[3][:] = 0
  batch[3][:, 2], batch[3][:, 4] = np.arange(n) // 64, np.arange(n) % 64
  output = make_act(model, ENV.action)(params, *batch)
  actions, log_probs = np.asarray(output.action)[:, 0], np.asarray(output.log_prob)
  for action in np.unique(actions):
    expected = np.exp(log_probs[actions == action][0])
    # Four standard deviations of a frequency of 4096 draws: 4 · sqrt(1/4 / 4096) = 0.031.
    assert np.mean(actions == action) == pytest.approx(expected, abs=0.032)


def test_log_prob_is_that_of_the_action_and_the_deterministic_action_is_the_likeliest():
  """Catches the log-probability of another action, and a mode that still draws."""
  model, params = make_policy()
  batch = random_batch(64)
  sampled, likeliest = (
    make_act(model, ENV.action)(params, *batch),
    make_act(model, ENV.action, deterministic=True)(params, *batch),
  )
  output = model.apply(params, *batch[:3])
  logits = np.asarray(output.logits[0])
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  for acted in (sampled, likeliest):
    picked = log_probs[np.arange(64), np.asarray(acted.action)[:, 0]]
    np.testing.assert_allclose(acted.params, logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(acted.log_prob, picked, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(acted.value, output.values[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(acted.core, output.core, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(likeliest.action[:, 0], logits.argmax(axis=1))
  assert np.any(np.asarray(sampled.action) != np.asarray(likeliest.action))


def publish(buffer: ParameterBuffer, policy: int, version: int, params: Any) -> None:
  buffer.publish(policy, version, flatten_params(params))


def test_published_policies_act_with_the_newest_version_of_each(compilations):
  """Catches a version that is not that of the parameters, policies mixed up, and recompilation."""
  model, first = make_policy(seed=0)
  second, third = make_policy(seed=1)[1], make_policy(seed=2)[1]
  topology = make_transport(envs=8).topology
  nbytes = flat_nbytes(first)
  buffer = ParameterBuffer(SharedBlock(), num_policies=2, nbytes=nbytes, allocate=True)
  act = make_act(model, ENV.action)
  policies = PublishedPolicies(
    act,
    template=jax.eval_shape(lambda: first),
    params=buffer,
    num_policies=2,
    specs=batch_specs(topology, ENV, CORE_SIZE),
  )
  publish(buffer, 0, 5, first)
  publish(buffer, 1, 7, second)
  for policy in (0, 1):
    policies.refresh(policy)
  policies.warm_up((4, 8))
  compiled = len(compilations)
  batch = random_batch(8)

  def ask(policy: int, n: int, bucket: int) -> Any:
    policies.refresh(policy)
    staged = policies.buffer()
    staged['obs/obs'][:n] = batch[0]['obs'][:n]
    for name, values in zip(('core', 'first', 'identity'), batch[1:], strict=True):
      staged[name][:n] = values[:n]
    return policies.act(policy, staged, n, bucket)

  def check(answer: Any, params: Any, version: int, n: int) -> None:
    assert answer.version == version
    for name in ActOutput._fields:
      np.testing.assert_allclose(
        getattr(answer, name), getattr(expected[id(params)], name)[:n], rtol=1e-5, atol=1e-6
      )

  answers = [ask(0, 3, 4), ask(1, 8, 8), ask(0, 8, 8)]
  publish(buffer, 0, 6, third)
  publish(buffer, 0, 9, second)
  answers += [ask(0, 5, 8), ask(1, 2, 4)]
  assert len(compilations) == compiled
  expected = {id(params): act(params, *batch) for params in (first, second)}
  wanted = [(first, 5, 3), (second, 7, 8), (first, 5, 8), (second, 9, 5), (second, 7, 2)]
  for answer, (params, version, n) in zip(answers, wanted, strict=True):
    assert len(answer.action) == n
    check(answer, params, version, n)
