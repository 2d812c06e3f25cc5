"""Recurrent cores: the equations, the reset rule, where gradients stop, and steps that add up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.config import Core
from sfjax.models.actor_critic import ActorCritic, init_params, make_model
from sfjax.models.cores import GRU, LSTM, NoCore, Stack
from sfjax.specs import EnvSpec, array_spec, discrete

STEPS, BATCH, FEATURES, SIZE = 6, 5, 3, 4


def random_params(params, seed=1):
  """Large random numbers for all parameters, biases too."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)


def random_inputs(state_size=SIZE, seed=0):
  """Features, a state, and an episode start in every third place and in the first."""
  rng = np.random.default_rng(seed)
  features = rng.normal(size=(STEPS, BATCH, FEATURES)).astype(np.float32)
  core = rng.normal(size=(BATCH, state_size)).astype(np.float32)
  first = rng.random((STEPS, BATCH)) < 0.3
  first[0, :2] = True, False
  return features, core, first


def shapes_of(module, *inputs) -> Any:
  return jax.eval_shape(module.init, jax.random.key(0), *inputs)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def gates_of(params, count):
  """Input kernel, input bias and recurrent kernel of each gate, in double precision."""
  kernels = params['inputs']['kernel'], params['inputs']['bias'], params['recurrent_kernel']
  return zip(*(np.split(np.asarray(k, np.float64), count, axis=-1) for k in kernels), strict=True)


def gru_in_numpy(params, x, state):
  """Cho et al. 2014 with the reset gate after the recurrent product: one step of one stream."""
  (w_r, b_r, u_r), (w_z, b_z, u_z), (w_n, b_n, u_n) = gates_of(params, 3)
  r = sigmoid(x @ w_r + b_r + state @ u_r)
  z = sigmoid(x @ w_z + b_z + state @ u_z)
  n = np.tanh(x @ w_n + b_n + r * (state @ u_n + np.asarray(params['recurrent_bias'], np.float64)))
  state = (1 - z) * n + z * state
  return state, state


def lstm_in_numpy(params, x, state):
  """Hochreiter & Schmidhuber 1997 with forget gates: one step of one stream, its state [h, c]."""
  h, c = state[:SIZE], state[SIZE:]
  i, f, g, o = (x @ w + b + h @ u for w, b, u in gates_of(params, 4))
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  h = sigmoid(o) * np.tanh(c)
  return np.concatenate([h, c]), h


def unroll_in_numpy(step, layers, features, core, first):
  """One stream at a time, layer on layer; the states of the layers lie one after the other."""
  outputs, last = np.zeros((STEPS, BATCH, SIZE)), np.zeros(core.shape)
  for b in range(BATCH):
    states = np.split(core[b].astype(np.float64), len(layers))
    for t in range(STEPS):
      x = features[t, b].astype(np.float64)
      for k, params in enumerate(layers):
        state = np.zeros_like(states[k]) if first[t, b] else states[k]
        states[k], x = step(params, x, state)
      outputs[t, b] = x
    last[b] = np.concatenate(states)
  return outputs, last


@pytest.mark.parametrize('layers', (1, 2))
@pytest.mark.parametrize(
  'kind, arrays, in_numpy', ((GRU, 1, gru_in_numpy), (LSTM, 2, lstm_in_numpy))
)
def test_cores_equal_their_equations_with_resets(kind, arrays, in_numpy, layers):
  """Catches swapped gates, a bias outside the reset gate, a reset after the step, of all streams
  or of one layer only, and states of layers, or h and c, in another order."""
  stack = Stack(tuple(kind(SIZE) for _ in range(layers)))
  inputs = random_inputs(arrays * layers * SIZE)
  params = random_params(shapes_of(stack, *inputs))
  output: Any = jax.jit(stack.apply)(params, *inputs)
  by_layer = [params['params'][f'layers_{i}'] for i in range(layers)]
  expected_outputs, expected_last = unroll_in_numpy(in_numpy, by_layer, *inputs)
  np.testing.assert_allclose(output[0], expected_outputs, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(output[1], expected_last, rtol=1e-5, atol=1e-5)


def test_a_new_lstm_remembers():
  """Catches a forget gate that starts half closed, and the bias given to another gate."""
  params = jax.jit(LSTM(SIZE).init)(jax.random.key(0), *random_inputs(2 * SIZE))['params']
  expected = np.concatenate([np.zeros(SIZE), np.ones(SIZE), np.zeros(2 * SIZE)])
  np.testing.assert_array_equal(params['inputs']['bias'], expected)  # pyright: ignore


def test_without_a_core_nothing_changes():
  features, core, first = random_inputs()
  output: Any = NoCore().apply({}, features, core, first)
  np.testing.assert_array_equal(output[0], features)
  np.testing.assert_array_equal(output[1], core)


@pytest.mark.parametrize('kind, arrays', ((GRU, 1), (LSTM, 2)))
def test_a_started_episode_forgets_what_was_before(kind, arrays):
  """Catches a reset that depends on anything: NaN and infinity must not come through it."""
  features, core, first = random_inputs(arrays * SIZE)
  first[3] = True
  core[0], core[1] = np.nan, np.inf
  features[:3, 2] = np.nan
  params = random_params(shapes_of(kind(SIZE), features, core, first))
  output: Any = kind(SIZE).apply(params, features, core, first)
  fresh: Any = kind(SIZE).apply(params, features[3:], np.zeros_like(core), first[3:])
  np.testing.assert_allclose(output[0][3:], fresh[0], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(output[1], fresh[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('kind, arrays', ((GRU, 1), (LSTM, 2)))
def test_gradients_stop_where_they_are_told_to_and_values_do_not_change(kind, arrays):
  """Catches a cut one step early or late, one that also cuts inputs, and one that resets."""
  features, core, _ = random_inputs(2 * arrays * SIZE)
  first = np.zeros((STEPS, BATCH), bool)
  params = random_params(shapes_of(Stack((kind(SIZE), kind(SIZE))), features, core, first))

  def unroll(bptt):
    stack = Stack((kind(SIZE, bptt), kind(SIZE, bptt)))

    @jax.jit
    def run(params, features, core, first):
      def last(features, core):
        outputs, _ = stack.apply(params, features, core, first)
        return jnp.sum(outputs[-1]), outputs

      return jax.grad(last, argnums=(0, 1), has_aux=True)(features, core)

    return run(params, features, core, first)

  (whole_features, whole_core), whole = unroll(None)
  (cut_features, cut_core), cut = unroll(4)
  np.testing.assert_allclose(cut, whole, rtol=1e-6, atol=1e-6)
  # Cuts are before t = 0 and t = 4: the last output, t = 5, is a function of the inputs at 4 and 5.
  reached = np.abs(cut_features).sum(axis=(1, 2)) > 0
  np.testing.assert_array_equal(reached, [False, False, False, False, True, True])
  np.testing.assert_allclose(cut_features[4:], whole_features[4:], rtol=1e-5, atol=1e-6)
  assert np.all(cut_core == 0)
  assert np.abs(whole_features).sum(axis=(1, 2)).min() > 0
  assert np.abs(whole_core).max() > 0


def test_bptt_comes_from_the_learner_and_leaves_gradients_of_each_part():
  """Catches a setting that nobody reads, and a part whose gradient is lost or counted twice.

  Cut every 3 steps, the gradient of a sum over all steps is the sum of those of the two halves,
  each from its own state.
  """
  config = small_config(Core.GRU)
  obs, core, first = random_inputs()
  model, params = make_policy(config)
  config.learner.bptt = 3
  cut, _ = make_policy(config)
  features: Any = jax.jit(model.apply, static_argnames='method')(
    params, {'obs': obs.reshape(-1, FEATURES)}, method='encode'
  )
  features = features.reshape(STEPS, BATCH, -1)

  def total(params, model, features, core, first):
    output = model.apply(params, features, core, first, method='unroll')
    return jnp.sum(output.values) + jnp.sum(jnp.square(output.logits)), output.core

  gradient = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
  half, state = gradient(params, model, features[:3], core, first[:3])
  other, _ = gradient(params, model, features[3:], state, first[3:])
  expected = jax.tree.map(jnp.add, half, other)
  at_once, _ = gradient(params, cut, features, core, first)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), at_once, expected
  )


def small_config(core, *, layers=1, separate=False) -> config_lib.Config:
  config = config_lib.Config()
  config.model.encoder = config_lib.Encoder.MLP
  config.model.mlp_layers = (8,)
  config.model.decoder_layers = (7,)
  config.model.core, config.model.core_size, config.model.core_layers = core, SIZE, layers
  config.model.separate_critic = separate
  return config


def make_policy(config) -> tuple[ActorCritic, Any]:
  env = EnvSpec({'obs': array_spec(np.float32, FEATURES)}, discrete(3))
  model, size = make_model(config, env), config_lib.core_size(config)
  shapes = jax.eval_shape(lambda key: init_params(model, key, env, size), jax.random.key(0))
  return model, random_params(shapes)


# Width of the state: arrays of a layer × layers × torsos × SIZE.
POLICIES = [
  (Core.NONE, 1, False, 0),
  (Core.NONE, 2, True, 0),
  (Core.GRU, 1, False, SIZE),
  (Core.GRU, 3, False, 3 * SIZE),
  (Core.LSTM, 1, False, 2 * SIZE),
  (Core.LSTM, 2, True, 2 * 2 * 2 * SIZE),
]


@pytest.mark.parametrize('core, layers, separate, size', POLICIES)
def test_acting_step_by_step_equals_learning_on_the_whole(core, layers, separate, size):
  """Catches two reset rules, a state that is not handed on, and time mixed up with streams."""
  config = small_config(core, layers=layers, separate=separate)
  assert config_lib.core_size(config) == size
  model, params = make_policy(config)
  obs, state, first = random_inputs(size)

  @jax.jit
  def learn(params, obs, state, first):
    features = model.apply(params, {'obs': obs.reshape(-1, FEATURES)}, method='encode')
    features = features.reshape(STEPS, BATCH, -1)  # pyright: ignore
    return model.apply(params, features, state, first, method='unroll')

  whole: Any = learn(params, obs, state, first)
  step: Any = jax.jit(model.apply)
  log_probs, values = [], []
  for t in range(STEPS):
    output = step(params, {'obs': obs[t]}, state, first[t])
    assert output.values.shape == (1, BATCH)
    log_probs.append(jax.nn.log_softmax(output.logits[0]))
    values.append(output.values[0])
    state = output.core
  for one, other in (
    (jax.nn.log_softmax(whole.logits), np.stack(log_probs)),
    (whole.values, np.stack(values)),
    (whole.core, state),
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
  assert whole.core.dtype == jnp.float32
