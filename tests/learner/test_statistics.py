"""Running statistics in the network and the update: what is normalised, when, and what stays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sfjax import config as config_lib
from sfjax.learner.devices import first_replica, replicate
from sfjax.learner.minibatches import Shuffle, shuffled_update
from sfjax.learner.update import AXIS, LearnerState, make_hyperparams, make_update
from sfjax.models.actor_critic import STATISTICS, ActorCritic, init_params, make_model
from sfjax.models.normalizers import init_moments, normalize
from tests.fakes import ENV
from tests.learner.update_cases import PIXELS, B, T, pmap_update, random_batch, shared, small_config


@functools.cache
def program(pixels: bool, devices: int, epochs: int) -> tuple[config_lib.Config, ActorCritic, Any]:
  """A model that normalises everything, and its compiled update."""
  config = small_config(config_lib.Core.NONE if pixels else config_lib.Core.GRU)
  config.model.normalize_obs, config.model.normalize_returns = ('obs',), True
  if pixels:
    config.model.encoder = config_lib.Encoder.CONV_SIMPLE
  env = PIXELS if pixels else ENV
  model = make_model(config, env)
  update: Any = make_update(
    model,
    optax.identity(),
    action=env.action,
    loss=config.loss,
    microbatch=B * (T + 1) // devices,
    axis_name=None if devices == 1 else AXIS,
  )
  if epochs > 1:
    update = shuffled_update(update, minibatches=1, axis_name=None)
  return config, model, pmap_update(update) if devices > 1 else jax.jit(update)


def make(*, env=ENV, devices=1, rate=0.1, epochs=1) -> tuple[ActorCritic, Any, LearnerState, Any]:
  """A model that normalises everything, its update, a fresh state, and hyperparameters."""
  config, model, update = program(env is PIXELS, devices, epochs)
  params = init_params(model, jax.random.key(0), env, config_lib.core_size(config))
  state = LearnerState(params, optax.EmptyState(), jnp.int32(10), jnp.ones(()))
  hyperparams = make_hyperparams(config)._replace(max_policy_lag=6, learning_rate=rate)
  return model, update, state, hyperparams


def batch_of(env=ENV, seed=0) -> Any:
  batch = random_batch(seed, env=env)
  if env is PIXELS:
    batch['core'] = batch['core'][:, :0]
  return batch


def valid_of(batch: Any) -> np.ndarray:
  return batch['played'] & (10 - batch['version'] <= 6)


@pytest.mark.parametrize('env', (ENV, PIXELS))
def test_statistics_are_those_of_valid_samples(env):
  """Catches statistics of stale or unplayed slots, of slot T, or of the optimizer's step."""
  _, update, state, hyperparams = make(env=env)
  batch = batch_of(env)
  batch['obs/obs'][-1] = 77  # Slot T is slot 0 of the next trajectory.
  batch['obs/obs'][:-1][~valid_of(batch)] = 99
  after, metrics = update(state, batch, hyperparams)
  assert metrics['applied']
  found = after.params[STATISTICS]['obs']['obs']
  samples = batch['obs/obs'][:-1][valid_of(batch)].astype(np.float64)
  samples = samples.reshape(-1, samples.shape[-1])
  np.testing.assert_allclose(found.mean, samples.mean(0), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(found.var, samples.var(0), rtol=1e-4, atol=1e-5)
  assert found.count == valid_of(batch).sum()
  assert after.params[STATISTICS]['returns'].count == valid_of(batch).sum()
  assert metrics['target_mean'] == pytest.approx(
    float(after.params[STATISTICS]['returns'].mean), abs=1e-5
  )


@pytest.mark.parametrize('env', (ENV, PIXELS))
def test_the_network_reads_normalised_observations(env):
  """Catches statistics that nothing reads, and bytes that are scaled twice."""
  model, update, state, hyperparams = make(env=env, rate=0.0)
  batch = batch_of(env)
  after, _ = update(state, batch, hyperparams)
  moments = after.params[STATISTICS]['obs']['obs']
  obs = batch['obs/obs'].reshape(-1, *batch['obs/obs'].shape[2:])
  plain = {'params': after.params['params'], STATISTICS: state.params[STATISTICS]}
  by_hand: Any = normalize(moments, jnp.asarray(obs, jnp.float32))
  if env is PIXELS:
    # Of bytes the scale is such that none is further than 5 away.
    mean, std = np.asarray(moments.mean), np.sqrt(np.asarray(moments.var) + 1e-5)
    by_hand = jnp.asarray((obs - mean) / np.maximum(std, np.maximum(mean, 255 - mean) / 5))
    plain[STATISTICS] = {
      'obs': {'obs': init_moments((3,))._replace(var=jnp.ones(3) - 1e-5)},
      'returns': after.params[STATISTICS]['returns'],
    }
  found, expected, before = (
    np.asarray(model.apply(params, {'obs': x}, method='encode'))
    for params, x in ((after.params, obs), (plain, by_hand), (state.params, obs))
  )
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
  assert np.abs(found - before).max() > 1e-2


def values(model: ActorCritic, params: Any, batch: Any) -> np.ndarray:
  obs: Any = {'obs': batch['obs/obs'].reshape(-1, 3)}
  features: Any = model.apply(params, obs, method='encode')
  features = features.reshape(T + 1, B, -1)
  output: Any = model.apply(params, features, batch['core'], batch['first'], method='unroll')
  return np.asarray(output.values)


def test_values_stay_as_they_were_when_the_units_change():
  """Catches a head that is not changed with the statistics: all values would jump."""
  model, update, state, hyperparams = make(rate=0.0)
  state.params[STATISTICS]['obs'] = {'obs': init_moments((3,))}
  batch = batch_of()
  batch['rewards'] = batch['rewards'] * 100 + 50
  frozen = dict(state.params[STATISTICS])
  after, _ = update(state, batch, hyperparams)
  assert after.params[STATISTICS]['returns'].var > 100
  same_obs = after.params | {STATISTICS: after.params[STATISTICS] | {'obs': frozen['obs']}}
  np.testing.assert_allclose(
    values(model, same_obs, batch), values(model, state.params, batch), rtol=1e-3, atol=1e-2
  )


def test_the_scale_of_rewards_changes_nothing_once_it_is_known():
  """Catches a loss or a clip in units of the return: its gradient would grow with the rewards."""
  steps = []
  for scale in (1.0, 1000.0):
    model, update, state, hyperparams = make(rate=0.0)
    batch = batch_of()
    batch['behaviour_value'] = batch['behaviour_value'] * scale
    batch['rewards'] = batch['rewards'] * scale
    known, _ = update(state, batch, hyperparams)
    for _ in range(3):  # Values are those of the head as it began, far too small at 1000.
      known, _ = update(known, batch, hyperparams)
    head = known.params['params']['value_head']
    head['kernel'], head['bias'] = jnp.zeros_like(head['kernel']), jnp.zeros_like(head['bias'])
    after, _ = update(known, batch, hyperparams._replace(learning_rate=0.1))
    old, new = (s.params['params']['torso'] for s in (known, after))
    steps.append(jax.tree.map(lambda a, b: np.asarray(a - b), old, new))
  for one, other in zip(*map(jax.tree.leaves, steps), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-4)


def test_a_sample_counts_in_the_first_epoch_alone():
  """Catches statistics that take a batch for several because it is gone through again."""
  _, update, state, hyperparams = make(epochs=2)
  batch = batch_of()
  first, _ = update(state, batch, hyperparams, Shuffle(0, 0, 10, 0, 0))
  second, _ = update(first, batch | {'entry_version': jnp.int32(10)}, hyperparams,
                     Shuffle(0, 0, 10, 1, 0))  # fmt: skip
  one, two = first.params[STATISTICS], second.params[STATISTICS]
  assert one['returns'].count == valid_of(batch).sum()
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_two_devices_have_the_statistics_of_one():
  """Catches a mean of means: devices have unequal numbers of valid samples."""
  batch = batch_of()
  batch['played'][:, B // 2 :] = False
  batch['played'][0, -1] = True
  batch['version'][0, -1] = 9
  _, one, state, hyperparams = make()
  _, two, _, _ = make(devices=2)
  alone, _ = one(state, batch, hyperparams)
  both, _ = two(replicate(state), shared(batch, 2), hyperparams)
  for a, b in zip(
    jax.tree.leaves(alone.params), jax.tree.leaves(first_replica(both).params), strict=True
  ):
    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_an_update_that_is_not_made_leaves_the_statistics():
  """Catches statistics that take in the batch which the update refused."""
  _, update, state, hyperparams = make()
  batch = batch_of()
  batch['rewards'][valid_of(batch)] = np.nan
  after, metrics = update(state, batch, hyperparams)
  assert not metrics['applied']
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
