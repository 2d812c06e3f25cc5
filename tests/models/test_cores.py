"""Recurrent cores: the equations, the reset rule, and that steps add up to an unroll."""

from typing import Any

import jax
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.models.actor_critic import ActorCritic, init_params, make_model
from sfjax.models.cores import GRU, NoCore
from sfjax.specs import EnvSpec, array_spec

STEPS, BATCH, FEATURES, SIZE = 6, 5, 3, 4


def random_params(params, seed=1):
  """Large random numbers for all parameters, biases too."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)


def random_inputs(seed=0):
  """Features, a state, and an episode start in every third place and in the first."""
  rng = np.random.default_rng(seed)
  features = rng.normal(size=(STEPS, BATCH, FEATURES)).astype(np.float32)
  core = rng.normal(size=(BATCH, SIZE)).astype(np.float32)
  first = rng.random((STEPS, BATCH)) < 0.3
  first[0, :2] = True, False
  return features, core, first


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def gru_in_numpy(params, features, core, first):
  """Cho et al. 2014 with the reset gate after the recurrent product, one stream at a time."""
  dense = params['params']['Dense_0']
  w_r, w_z, w_n = np.split(np.asarray(dense['kernel'], np.float64), 3, axis=1)
  b_r, b_z, b_n = np.split(np.asarray(dense['bias'], np.float64), 3)
  u_r, u_z, u_n = np.split(np.asarray(params['params']['recurrent_kernel'], np.float64), 3, axis=1)
  recurrent_bias = np.asarray(params['params']['recurrent_bias'], np.float64)
  outputs = np.zeros((STEPS, BATCH, SIZE))
  last = np.zeros((BATCH, SIZE))
  for b in range(BATCH):
    h = core[b].astype(np.float64)
    for t in range(STEPS):
      if first[t, b]:
        h = np.zeros(SIZE)
      x = features[t, b].astype(np.float64)
      r = sigmoid(x @ w_r + b_r + h @ u_r)
      z = sigmoid(x @ w_z + b_z + h @ u_z)
      n = np.tanh(x @ w_n + b_n + r * (h @ u_n + recurrent_bias))
      h = (1 - z) * n + z * h
      outputs[t, b] = h
    last[b] = h
  return outputs, last


def test_gru_equals_its_equations_with_resets():
  """Catches swapped gates, a bias outside the reset gate, a reset after the step or of all."""
  inputs = random_inputs()
  params = random_params(jax.eval_shape(GRU(SIZE).init, jax.random.key(0), *inputs))
  output: Any = GRU(SIZE).apply(params, *inputs)
  expected_outputs, expected_last = gru_in_numpy(params, *inputs)
  np.testing.assert_allclose(output[0], expected_outputs, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(output[1], expected_last, rtol=1e-5, atol=1e-5)


def test_without_a_core_nothing_changes():
  features, core, first = random_inputs()
  output: Any = NoCore().apply({}, features, core, first)
  np.testing.assert_array_equal(output[0], features)
  np.testing.assert_array_equal(output[1], core)


def test_a_started_episode_forgets_what_was_before():
  """Catches a reset that depends on anything: NaN and infinity must not come through it."""
  features, core, first = random_inputs()
  first[3] = True
  core[0], core[1] = np.nan, np.inf
  features[:3, 2] = np.nan
  shapes = jax.eval_shape(GRU(SIZE).init, jax.random.key(0), features, core, first)
  params = random_params(shapes)
  output: Any = GRU(SIZE).apply(params, features, core, first)
  fresh: Any = GRU(SIZE).apply(params, features[3:], np.zeros_like(core), first[3:])
  np.testing.assert_allclose(output[0][3:], fresh[0], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(output[1], fresh[1], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope='module', params=list(config_lib.Core))
def policy(request) -> tuple[ActorCritic, Any]:
  config = config_lib.Config()
  config.model.encoder = config_lib.Encoder.MLP
  config.model.mlp_layers = (8,)
  config.model.core = request.param
  config.model.core_size = SIZE
  env = EnvSpec({'obs': array_spec(np.float32, FEATURES)}, num_actions=3)
  model = make_model(config, env)
  size = config_lib.core_size(config)
  shapes = jax.eval_shape(lambda key: init_params(model, key, env, size), jax.random.key(0))
  return model, random_params(shapes)


def test_acting_step_by_step_equals_learning_on_the_whole(policy):
  """Catches two reset rules, a state that is not handed on, and time mixed up with streams."""
  model, params = policy
  obs, core, first = random_inputs()
  if isinstance(model.core, NoCore):
    core = core[:, :0]
  features: Any = model.apply(params, {'obs': obs.reshape(-1, FEATURES)}, method='encode')
  features = features.reshape(STEPS, BATCH, -1)
  whole: Any = jax.jit(model.apply, static_argnames='method')(
    params, features, core, first, method='unroll'
  )
  step: Any = jax.jit(model.apply)
  logits, values = [], []
  for t in range(STEPS):
    output = step(params, {'obs': obs[t]}, core, first[t])
    assert output.values.shape == (1, BATCH)
    logits.append(output.logits[0])
    values.append(output.values[0])
    core = output.core
  for one, other in (
    (whole.logits, np.stack(logits)),
    (whole.values, np.stack(values)),
    (whole.core, core),
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
