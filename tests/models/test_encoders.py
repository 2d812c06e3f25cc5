"""Encoders: their layers and sizes, what becomes of bytes, and observations of several parts."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax.config import Encoder
from sfjax.models.actor_critic import init_params, make_model
from sfjax.models.encoders import CONV_LAYERS, ConvEncoder, ObsEncoder, ResNetEncoder, make_encoder
from sfjax.models.layers import LayerOptions, Mlp
from sfjax.specs import ArraySpec, EnvSpec, array_spec, discrete
from tests.models.test_convolution import xla_convolution, xla_max_pool

DOOM = {'obs': array_spec(np.uint8, 72, 128, 3)}
BATTLE = DOOM | {'measurements': array_spec(np.float32, 23)}
IMAGE_ENCODERS = [encoder for encoder in Encoder if encoder is not Encoder.MLP]


def random_params(shapes: Any, seed: int = 0) -> Any:
  """Random numbers for all parameters, biases too, that keep the size of activations."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: (
      rng.normal(size=leaf.shape) / np.sqrt(max(leaf.size // leaf.shape[-1], 1))
    ).astype(np.float32),
    shapes,
  )


def shapes_of(encoder: ObsEncoder, obs: dict[str, ArraySpec]) -> Any:
  zeros = {key: np.zeros((1, *spec.shape), spec.dtype) for key, spec in obs.items()}
  return jax.eval_shape(encoder.init, jax.random.key(0), zeros)['params']


def count(params: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(params))


# Kernels in order, and the size of what the first dense layer sees: conv_simple sees
# 72 × 128 → 17 × 31 → 7 × 14 → 3 × 6 of 128 channels; conv_atari 7 × 14 → 5 × 12 of 64; resnet
# 72 × 128 → 36 × 64 → 18 × 32 → 9 × 16 of 32.
LAYERS = {
  Encoder.CONV_SIMPLE: ([(8, 8, 3, 32), (4, 4, 32, 64), (3, 3, 64, 128)], 2304),
  Encoder.CONV_ATARI: ([(8, 8, 3, 32), (4, 4, 32, 64), (3, 3, 64, 64)], 3840),
  Encoder.CONV_IMPALA: ([(8, 8, 3, 16), (4, 4, 16, 32)], 3136),
  Encoder.RESNET: (
    [(3, 3, 3, 16)] + [(3, 3, 16, 16)] * 4 + [(3, 3, 16, 32)] + [(3, 3, 32, 32)] * 9,
    4608,
  ),
}


@pytest.mark.parametrize('encoder', IMAGE_ENCODERS)
def test_the_encoders_of_doom_have_the_layers_they_say(encoder):
  """Catches another kernel, stride, padding or width, and dense layers other than configured."""
  model = config_lib.ModelConfig(encoder=encoder, conv_dense_layers=(100, 50))
  params = shapes_of(make_encoder(model, DOOM), DOOM)['encoders_obs']
  shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
  kernels, features = LAYERS[encoder]
  assert sorted(shape for shape in shapes if len(shape) == 4) == sorted(kernels)
  assert sorted(shape for shape in shapes if len(shape) == 1) == sorted(
    [kernel[-1:] for kernel in kernels] + [(100,), (50,)]
  )
  assert [params['dense'][f'Dense_{i}']['kernel'].shape for i in range(2)] == [
    (features, 100),
    (100, 50),
  ]
  model.conv_dense_layers = ()
  obs = {'obs': np.zeros((3, 72, 128, 3), np.uint8)}
  shape, _ = jax.eval_shape(make_encoder(model, DOOM).init_with_output, jax.random.key(0), obs)
  assert shape.shape == (3, features)


# Of Sample Factory: 3.2 of its table for Discrete(4) and a GRU of 512; doom_battle has 21 actions
# and 23 measurements, which go through 128-128. We have 1,024 less a network with a GRU of 512:
# the recurrent biases of the update and reset gates, which only add to those of the inputs.
TOTALS = [
  (Encoder.CONV_SIMPLE, DOOM, False, 2_871_525 - 1024),
  (Encoder.CONV_IMPALA, DOOM, False, 3_195_957 - 1024),
  (Encoder.CONV_ATARI, DOOM, False, 3_621_029 - 1024),
  (Encoder.RESNET, DOOM, False, 4_035_909 - 1024),
  (Encoder.CONV_SIMPLE, BATTLE, False, 3_096_438 - 1024),
  (Encoder.CONV_SIMPLE, BATTLE, True, 6_181_590 - 2 * 1024),
  (Encoder.RESNET, BATTLE, False, 4_260_822 - 1024),
]


@pytest.mark.parametrize('encoder, obs, separate, total', TOTALS)
def test_whole_networks_have_as_many_parameters_as_those_of_sample_factory(
  encoder, obs, separate, total
):
  """Catches a layer too many or too few anywhere between observation and heads."""
  config = config_lib.Config()
  config.model.encoder, config.model.separate_critic = encoder, separate
  env = EnvSpec(obs, discrete(21 if 'measurements' in obs else 4))
  model, size = make_model(config, env), config_lib.core_size(config)
  shapes = jax.eval_shape(lambda key: init_params(model, key, env, size), jax.random.key(0))
  assert count(shapes) == total


@pytest.mark.parametrize('encoder', IMAGE_ENCODERS)
def test_the_smallest_image_is_the_one_that_still_has_a_pixel_at_the_end(encoder):
  """Catches a limit that is not that of the layers: a network of nothing, or a refusal too many."""
  for pixels in (config_lib.MIN_PIXELS[encoder], config_lib.MIN_PIXELS[encoder] - 1):
    side = pixels
    for _, kernel, stride in CONV_LAYERS.get(encoder, ()):
      side = (side - kernel) // stride + 1
    assert (side >= 1) == (pixels == config_lib.MIN_PIXELS[encoder])


def resnet_in_xla(params, x, groups):
  """Espeholt et al. 2018, figure 3, from XLA's own convolution and pooling."""

  def convolve(x, conv):
    out = xla_convolution(x, conv['kernel'], stride=1, padding='SAME')
    return out + conv['bias'][None, None, None]

  for i in range(groups):
    x = xla_max_pool(convolve(x, params[f'group_{i}']))
    for j in range(2):
      block = params[f'group_{i}_block_{j}']
      inner = convolve(jax.nn.relu(x), block['Conv_0'])
      x = x + convolve(jax.nn.relu(inner), block['Conv_1'])
  return jax.nn.relu(x).reshape(len(x), -1)


def test_the_resnet_is_that_of_its_paper():
  """Catches a lost skip, an activation before the pool or after the sum, none at the end."""
  options = LayerOptions(activation=jax.nn.relu)
  encoder = ResNetEncoder(groups=(2, 3), dense=(), options=options)
  x = np.random.default_rng(0).normal(size=(2, 9, 6, 3)).astype(np.float32)
  params = random_params(jax.eval_shape(encoder.init, jax.random.key(0), x))

  @jax.jit
  def both(params, x):
    def gradient(apply):
      def total(params):
        features = apply(params)
        return jnp.sum(features**2), features

      return jax.grad(total, has_aux=True)(params)

    ours = gradient(lambda params: encoder.apply(params, x))
    return ours, gradient(lambda params: resnet_in_xla(params['params'], x, 2))

  (gradients, features), expected = both(params, x)
  # 9 × 6 → 5 × 3 → 3 × 2 of 3 channels.
  assert features.shape == (2, 18)
  assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradients))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
    (gradients, features),
    expected,
  )


@pytest.fixture(scope='module')
def images():
  """A small encoder with large random parameters, jitted, these, and a few images."""
  encoder = ConvEncoder(convs=((6, 4, 2), (5, 3, 2)), dense=(8,))
  obs = np.random.default_rng(0).integers(0, 256, (3, 14, 12, 3)).astype(np.uint8)
  params = random_params(jax.eval_shape(encoder.init, jax.random.key(0), obs))
  return jax.jit(encoder.apply), jax.tree.map(lambda leaf: 2 * leaf, params), obs


def test_bytes_are_read_as_0_to_1(images):
  """Catches a scale that is missing, applied twice, or applied to numbers that are no bytes."""
  encode, params, obs = images
  pixels = obs.astype(np.float32) / 255
  np.testing.assert_allclose(encode(params, obs), encode(params, pixels), rtol=1e-4, atol=1e-4)
  dark, low = np.zeros_like(obs), np.ones(obs.shape, np.float32) / 255
  np.testing.assert_allclose(encode(params, dark + 1), encode(params, low), rtol=1e-4, atol=1e-4)
  assert np.abs(encode(params, dark) - encode(params, obs)).max() > 0.1


def test_gradients_of_bytes_are_those_of_the_numbers_they_stand_for(images):
  """Catches a gradient that is not scaled as the output is."""
  encode, params, obs = images

  @jax.jit
  def gradients(params, obs):
    return jax.grad(lambda params: jnp.sum(jnp.square(encode(params, obs))))(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max()),
    gradients(params, obs),
    gradients(params, obs.astype(np.float32) / 255),
  )


def test_observations_do_not_see_each_other(images):
  """Catches patches that mix images."""
  encode, params, obs = images
  mixed = np.stack([obs[1], obs[1], obs[0]])
  one, other = encode(params, obs), encode(params, mixed)
  np.testing.assert_allclose(other[2], one[0], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(other[:2], np.stack([one[1]] * 2), rtol=1e-5, atol=1e-5)


ACTIVATIONS = {
  'elu': lambda x: np.where(x > 0, x, np.expm1(x)),
  'relu': lambda x: np.maximum(x, 0),
  'tanh': np.tanh,
}


@pytest.mark.parametrize('activation', list(config_lib.Activation))
def test_an_mlp_is_the_activation_of_its_layers(activation):
  """Catches a missing nonlinearity, another than the one asked for, and a layer too few."""
  model = config_lib.ModelConfig(encoder=Encoder.MLP, mlp_layers=(5, 3), activation=activation)
  specs = {'obs': array_spec(np.float32, 2)}
  encoder = make_encoder(model, specs)
  obs = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
  params = random_params(shapes_of(encoder, specs))
  hidden = obs
  for layer in ('Dense_0', 'Dense_1'):
    dense = params['encoders_obs'][layer]
    hidden = ACTIVATIONS[activation.value](hidden @ dense['kernel'] + dense['bias'][None])
  features: Any = encoder.apply({'params': params}, {'obs': obs})
  np.testing.assert_allclose(features, hidden, rtol=1e-5, atol=1e-6)


def test_parts_of_an_observation_are_joined_by_key():
  """Catches features in the order of a dictionary, a part left out, and one read for another."""
  specs = {
    'speed': array_spec(np.float32, 4),
    'camera': array_spec(np.uint8, 20, 20, 3),
    'aim': array_spec(np.float32, 4),
  }
  model = config_lib.ModelConfig(
    encoder=Encoder.CONV_IMPALA, conv_dense_layers=(6,), mlp_layers=(7, 5)
  )
  encoder = make_encoder(model, specs)
  params = random_params(shapes_of(encoder, specs))
  rng = np.random.default_rng(0)
  obs = {key: rng.normal(size=(3, *spec.shape)).astype(spec.dtype) for key, spec in specs.items()}
  obs['camera'] = rng.integers(0, 256, (3, 20, 20, 3)).astype(np.uint8)
  features: Any = encoder.apply({'params': params}, obs | {'unknown': np.zeros(3)})
  alone = [
    encoder.encoders[key].apply({'params': params[f'encoders_{key}']}, obs[key])
    for key in ('aim', 'camera', 'speed')
  ]
  assert [part.shape for part in alone] == [(3, 5), (3, 6), (3, 5)]  # pyright: ignore
  np.testing.assert_allclose(features, np.concatenate(alone, axis=-1), rtol=1e-5, atol=1e-5)  # pyright: ignore
  turned = make_encoder(model, dict(reversed(specs.items())))
  for order in (obs, dict(reversed(obs.items()))):
    again: Any = turned.apply({'params': params}, order)
    np.testing.assert_allclose(again, features, rtol=1e-5, atol=1e-5)


def test_one_part_alone_has_just_its_encoder():
  """Catches a layer that joins nothing."""
  model = config_lib.ModelConfig(encoder=Encoder.MLP, mlp_layers=(5,))
  encoder = make_encoder(model, {'obs': array_spec(np.float32, 2)})
  assert isinstance(encoder.encoders['obs'], Mlp)
  assert count(shapes_of(encoder, {'obs': array_spec(np.float32, 2)})) == 2 * 5 + 5


@pytest.mark.parametrize('shape, encoder', (((4,), 'conv_atari'), ((72, 128, 3), 'mlp')))
def test_a_network_of_the_wrong_encoder_is_refused(shape, encoder):
  """Catches an error from deep inside the network."""
  config = config_lib.Config()
  config.model.encoder = Encoder(encoder)
  with pytest.raises(ValueError, match=re.escape(f'model.encoder is {encoder}')):
    make_model(config, EnvSpec({'obs': array_spec(np.uint8, *shape)}, discrete(2)))
