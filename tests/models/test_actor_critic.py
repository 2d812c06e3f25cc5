"""The whole network: its first weights, heads, separate critic, gradients and precision."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.config import ComputeDtype, Core, Encoder, Init
from sfjax.models.actor_critic import ActorCritic, init_params, make_model
from sfjax.specs import EnvSpec, array_spec, discrete
from tests.models.test_encoders import random_params

CONFIGS = Path(__file__).parents[2] / 'configs'
STEPS, BATCH, ACTIONS = 3, 2, 5


def small_config(encoder=Encoder.CONV_IMPALA) -> config_lib.Config:
  """Every kind of layer: convolutions, dense ones, a vector beside the image, cores, a decoder.

  With the ResNet, which has many layers to compile, no core and no torso of the critic's own.
  """
  config = config_lib.Config()
  config.model.encoder = encoder
  config.model.conv_dense_layers = (24,)
  config.model.mlp_layers = (20, 12)
  config.model.core, config.model.core_layers, config.model.core_size = Core.LSTM, 2, 16
  config.model.decoder_layers = (18,)
  config.model.separate_critic = True
  if encoder is Encoder.RESNET:
    config.model.core, config.model.separate_critic = Core.NONE, False
  return config


def small_env(encoder) -> EnvSpec:
  side = 4 if encoder is Encoder.RESNET else config_lib.MIN_PIXELS[encoder]
  specs = {'obs': array_spec(np.uint8, side, side, 3), 'speed': array_spec(np.float32, 6)}
  return EnvSpec(specs, discrete(ACTIONS))


def make_inputs(env: EnvSpec, core_size: int) -> tuple[dict[str, np.ndarray], Any, Any]:
  rng = np.random.default_rng(0)
  n = STEPS * BATCH
  obs = {
    'obs': rng.integers(0, 256, (n, *env.obs['obs'].shape)).astype(np.uint8),
    'speed': rng.normal(size=(n, 6)).astype(np.float32),
  }
  core = rng.normal(size=(BATCH, core_size)).astype(np.float32)
  return obs, core, np.zeros((STEPS, BATCH), bool)


def forward(model: ActorCritic, params, obs, core, first) -> Any:
  features = model.apply(params, obs, method='encode').reshape(STEPS, BATCH, -1)  # pyright: ignore
  return model.apply(params, features, core, first, method='unroll')


def shapes_of(model: ActorCritic, env: EnvSpec, config: config_lib.Config) -> Any:
  size = config_lib.core_size(config)
  return jax.eval_shape(lambda key: init_params(model, key, env, size), jax.random.key(0))


def kernels_and_biases(params) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """All parameters by their path, split by whether they are weights."""
  leaves = jax.tree_util.tree_leaves_with_path(params['params'])
  named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
  kernels = {name: np.asarray(leaf) for name, leaf in named.items() if name.endswith('kernel')}
  return kernels, {name: np.asarray(named[name]) for name in named.keys() - kernels.keys()}


GAIN = 1.5
KEY = jax.random.key(0, impl='rbg')  # Whose programs compile in a third of the time.


def expected_gain(name: str) -> float:
  """Heads have scales of their own, gates of cores 1, all other layers what is configured."""
  if name.startswith('policy_head'):
    return 0.01
  if name.startswith('value_head'):
    return 0.1
  return 1.0 if '/core/' in name else GAIN


def check_orthogonal(kernel: np.ndarray, gain: float) -> None:
  matrix = kernel.reshape(-1, kernel.shape[-1]).astype(np.float64)
  short = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
  np.testing.assert_allclose(short, gain**2 * np.eye(len(short)), atol=1e-5 * gain**2)


def check_distribution(kernel: np.ndarray, *, std: float, largest: float) -> None:
  """Standard deviation within 4 of its own errors, which is at most 1 / √(2 n) of it here."""
  assert np.abs(kernel).max() <= largest * (1 + 1e-6)
  error = 4 / np.sqrt(2 * kernel.size)
  np.testing.assert_allclose(np.sqrt(np.mean(kernel**2)), std, rtol=error)
  if kernel.size > 500:
    assert np.abs(kernel).max() > 0.9 * largest


def check_xavier(kernel: np.ndarray, gain: float) -> None:
  # Uniform in ±gain √(6 / (fan in + fan out)), whose deviation is 1/√3 of that.
  positions = int(np.prod(kernel.shape[:-2]))
  limit = gain * np.sqrt(6 / (positions * sum(kernel.shape[-2:])))
  check_distribution(kernel, std=limit / np.sqrt(3), largest=limit)


def check_lecun(kernel: np.ndarray, gain: float) -> None:
  # Normal of deviation gain / √(fan in) after cutting at 2 of the deviation before: that is
  # 1 / 0.87962566 of it.
  std = gain / np.sqrt(np.prod(kernel.shape[:-1]))
  check_distribution(kernel, std=std, largest=2 * std / 0.87962566)


CHECKS = {
  Init.ORTHOGONAL: check_orthogonal,
  Init.XAVIER_UNIFORM: check_xavier,
  Init.LECUN_NORMAL: check_lecun,
}


@pytest.mark.parametrize(
  'encoder, init',
  [*((Encoder.CONV_IMPALA, init) for init in Init), (Encoder.RESNET, Init.ORTHOGONAL)],
)
def test_initial_weights_reach_every_layer(encoder, init):
  """Catches a layer left at the library's default (Sample Factory has several), a gain that does
  not arrive or arrives at cores or heads, and biases that are not 0."""
  config, env = small_config(encoder), small_env(encoder)
  config.model.init, config.model.init_gain = init, GAIN
  config.model.separate_critic, config.model.core_layers = False, 1  # Less to compile.
  model, size = make_model(config, env), config_lib.core_size(config)
  params = jax.jit(lambda key: init_params(model, key, env, size))(KEY)
  kernels, biases = kernels_and_biases(params)
  # Convolutions, dense after them, two over the vector, two in each core, decoder; heads.
  expected = 2 + 1 + 2 + 2 + 1 + 2 if encoder is Encoder.CONV_IMPALA else 15 + 1 + 2 + 1 + 2
  assert len(kernels) == expected
  for name, kernel in kernels.items():
    CHECKS[init](kernel, expected_gain(name))
  for name, bias in biases.items():
    forget = 16 if '/core/' in name else 0  # Ones of the LSTM's forget gates.
    assert bias.sum() == forget == np.count_nonzero(bias), name


def load_config(file: str) -> config_lib.Config:
  spec = importlib.util.spec_from_file_location(f'tests_{file}', CONFIGS / f'{file}.py')
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def sorted_shapes(config, env) -> list[tuple[int, ...]]:
  return sorted(
    leaf.shape for leaf in jax.tree.leaves(shapes_of(make_model(config, env), env, config))
  )


def test_the_network_of_doom_is_the_one_its_results_were_measured_with():
  """Catches a default that changes the network of configs/doom.py."""
  env = EnvSpec({'obs': array_spec(np.uint8, 72, 128, 3)}, discrete(4))
  convs = [(8, 8, 3, 32), (32,), (4, 4, 32, 64), (64,), (3, 3, 64, 128), (128,)]
  encoder = [*convs, (2304, 512), (512,)]
  heads = [(512, 4), (4,), (512, 1), (1,)]
  assert sorted_shapes(load_config('doom'), env) == sorted([*encoder, *heads])
  gru = [(512, 1536), (1536,), (512, 1536), (512,)]
  assert sorted_shapes(config_lib.Config(), env) == sorted([*encoder, *gru, *heads])


def test_the_network_of_cartpole_is_the_one_its_results_were_measured_with():
  """Catches a default that changes configs/cartpole.py: two layers of 64, tanh, gain √2."""
  env = EnvSpec({'obs': array_spec(np.float32, 4)}, discrete(2))
  config = load_config('cartpole')
  model = make_model(config, env)
  params: Any = jax.jit(lambda key: init_params(model, key, env, 0))(KEY)
  assert sorted_shapes(config, env) == sorted(
    [(4, 64), (64,), (64, 64), (64,), (64, 2), (2,), (64, 1), (1,)]
  )
  layers = params['params']['torso']['encoder']['encoders_obs']
  for layer in layers.values():
    check_orthogonal(np.asarray(layer['kernel']), 2**0.5)
  obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
  hidden = np.tanh(np.tanh(obs @ layers['Dense_0']['kernel']) @ layers['Dense_1']['kernel'])
  features = model.apply(params, {'obs': obs}, method='encode')
  np.testing.assert_allclose(features, hidden, rtol=1e-5, atol=1e-6)  # pyright: ignore


@functools.cache
def head_gradients() -> tuple[Any, Any]:
  """Gradients of all logits alone and of all values alone."""
  config, env = small_config(), small_env(Encoder.CONV_IMPALA)
  model = make_model(config, env)
  params = random_params(shapes_of(model, env, config))

  @jax.jit
  def gradients(params, obs, core, first):
    _, pullback = jax.vjp(lambda params: forward(model, params, obs, core, first)[:2], params)
    logits, values = jnp.ones((STEPS, BATCH, ACTIONS)), jnp.ones((STEPS, BATCH))
    return (
      pullback((logits, jnp.zeros_like(values)))[0],
      pullback((jnp.zeros_like(logits), values))[0],
    )

  return gradients(params, *make_inputs(env, config_lib.core_size(config)))


def test_a_separate_critic_shares_nothing():
  """Catches a head on the other's torso, halves swapped or mixed, and a shared encoder."""
  of_logits, of_values = map(kernels_and_biases, head_gradients())
  for (kernels, biases), own in (
    (of_logits, ('torso/', 'policy')),
    (of_values, ('critic', 'value')),
  ):
    for name, gradient in (kernels | biases).items():
      if not name.startswith(own):
        assert np.all(gradient == 0), name


def test_every_parameter_has_a_gradient():
  """Catches a layer that is made and not used, and a gradient that stops on its way."""
  both = jax.tree.map(np.add, *head_gradients())
  kernels, biases = kernels_and_biases(both)
  for name, gradient in (kernels | biases).items():
    assert np.all(np.isfinite(gradient)), name
    assert np.abs(gradient).max() > 1e-6, name


def test_a_shared_torso_carries_both_heads():
  """Catches a critic of its own where none was asked for, and a value head that cuts gradients."""
  config = small_config()
  config.model.separate_critic = False
  config.model.encoder, config.model.core = Encoder.MLP, Core.NONE
  env = EnvSpec({'speed': array_spec(np.float32, 6)}, discrete(ACTIONS))
  model = make_model(config, env)
  params = random_params(shapes_of(model, env, config))
  assert sorted(params['params']) == ['policy_head', 'torso', 'value_head']
  obs = {'speed': np.random.default_rng(0).normal(size=(BATCH, 6)).astype(np.float32)}

  def total(params, field):
    output = model.apply(params, obs, jnp.zeros((BATCH, 0)), jnp.ones(BATCH, bool))
    return jnp.sum(getattr(output, field))

  for field in ('logits', 'values'):
    gradient = jax.jit(jax.grad(total), static_argnums=1)(params, field)
    kernels, _ = kernels_and_biases({'params': gradient['params']['torso']})
    assert len(kernels) == 3
    assert all(np.abs(kernel).max() > 0 for kernel in kernels.values())


def test_learned_deviations_follow_the_other_parameters():
  """Catches deviations that depend on the observation, or that nothing learns."""
  env = EnvSpec({'speed': array_spec(np.float32, 6)}, discrete(ACTIONS))
  config = small_config()
  config.model.encoder, config.model.core = Encoder.MLP, Core.NONE
  plain = make_model(config, env)
  model = plain.clone(learned_log_std=2)
  params: Any = jax.jit(lambda key: init_params(model, key, env, 0))(KEY)
  np.testing.assert_array_equal(params['params']['log_std'], np.zeros(2))
  params['params']['log_std'] = np.array([0.5, -2.0], np.float32)
  obs = {'speed': np.random.default_rng(0).normal(size=(BATCH, 6)).astype(np.float32)}
  inputs = obs, np.zeros((BATCH, 0), np.float32), np.ones(BATCH, bool)
  output: Any = jax.jit(model.apply)(params, *inputs)
  assert output.logits.shape == (1, BATCH, ACTIONS + 2)
  np.testing.assert_array_equal(output.logits[0, :, ACTIONS:], [[0.5, -2.0]] * BATCH)
  del params['params']['log_std']
  expected: Any = jax.jit(plain.apply)(params, *inputs)
  np.testing.assert_array_equal(output.logits[..., :ACTIONS], expected.logits)


@pytest.mark.parametrize('core', (Core.GRU, Core.LSTM))
def test_bfloat16_is_close_to_float32_and_goes_no_further_than_the_heads(core):
  """Catches outputs, a stored state or parameters of bfloat16, and a setting that nobody reads.

  A bfloat16 has 8 bits: rounding errs by up to 2^-9 = 0.2 % of a number. Through some ten layers
  here that makes errors of a percent or so of the largest output.
  """
  config, env = small_config(), small_env(Encoder.CONV_IMPALA)
  config.model.core, config.model.core_layers = core, 1
  config.model.separate_critic = False
  inputs = make_inputs(env, config_lib.core_size(config))
  exact = make_model(config, env)
  params = random_params(shapes_of(exact, env, config))
  config.model.compute_dtype = ComputeDtype.BFLOAT16
  rough = make_model(config, env)
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes_of(rough, env, config))} == {
    np.dtype(np.float32)
  }

  @jax.jit
  def both(params, obs, core, first):
    return [forward(model, params, obs, core, first) for model in (exact, rough)]

  expected, output = both(params, *inputs)
  for one, other in zip(output, expected, strict=True):
    assert one.dtype == jnp.float32
    error = np.abs(one - other).max() / np.abs(other).max()
    assert 1e-5 < error < 0.03
  features: Any = jax.eval_shape(lambda: rough.apply(params, inputs[0], method='encode'))
  assert features.dtype == jnp.bfloat16
