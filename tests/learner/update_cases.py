"""A small network, batches with everything in them, and gradients of the update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sfjax import config as config_lib
from sfjax.learner.devices import first_replica, replicate
from sfjax.learner.update import (
  AXIS,
  Hyperparams,
  LearnerState,
  Update,
  make_hyperparams,
  make_update,
)
from sfjax.models.actor_critic import ActorCritic, init_params, make_model
from sfjax.specs import EnvSpec, array_spec, discrete
from tests.fakes import CORE_SIZE, ENV

T, B = 6, 8
PIXELS = EnvSpec({'obs': array_spec(np.uint8, 36, 36, 3)}, discrete(4))


def small_config(core=config_lib.Core.GRU) -> config_lib.Config:
  config = config_lib.Config()
  config.model.encoder = config_lib.Encoder.MLP
  config.model.mlp_layers = (8,)
  lstm = core is config_lib.Core.LSTM  # Its state is twice as wide.
  config.model.core, config.model.core_size = core, CORE_SIZE // 2 if lstm else CORE_SIZE
  config.model.conv_dense_layers = (8,)
  config.learner.rollout, config.learner.batch_size = T, T * B
  return config


def random_params(model: ActorCritic, env: EnvSpec, core_size: int, seed=0) -> Any:
  """Large random numbers, so that no part of the network is close to linear or to uniform."""
  shapes = jax.eval_shape(lambda key: init_params(model, key, env, core_size), jax.random.key(0))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / max(leaf.size // 64, 1) ** 0.5,
    shapes,
  )


def random_batch(seed=0, *, env=ENV, b=B) -> dict[str, np.ndarray]:
  """A batch [T, B] with every kind of end, ratios that are not 1, and one sample in five old."""
  rng = np.random.default_rng(seed)
  obs = {name: rng.normal(size=(T + 1, b, *spec.shape)) * 40 for name, spec in env.obs.items()}
  batch = {
    f'obs/{name}': np.abs(obs[name]).astype(spec.dtype)
    if spec.dtype == np.uint8
    else (obs[name] / 40).astype(spec.dtype)
    for name, spec in env.obs.items()
  }
  first = rng.random((T + 1, b)) < 0.15
  played = rng.random((T, b)) < 0.85
  batch |= {
    'first': first,
    'actions': rng.integers(0, env.action.num_logits, (T, b, 1)).astype(np.int32),
    'behaviour_log_prob': rng.uniform(-2.5, -0.5, (T, b)).astype(np.float32),
    'behaviour_value': rng.normal(size=(T, b)).astype(np.float32),
    'behaviour_params': rng.normal(size=(T, b, env.action.num_params)).astype(np.float32),
    'rewards': rng.normal(size=(T, b)).astype(np.float32),
    'terminated': first[1:] & played & (rng.random((T, b)) < 0.5),
    'played': played,
    'version': np.where(rng.random((T, b)) < 0.2, 2, 8).astype(np.int32),
    'learner_version': rng.integers(8, 10, (T, b)).astype(np.int32),
    'core': rng.normal(size=(b, CORE_SIZE)).astype(np.float32),
  }
  return batch


def shared(batch: dict[str, np.ndarray], devices: int) -> Any:
  """The batch as the batcher lays it out: the first B / devices rows to the first device."""

  def split(name: str, array: np.ndarray) -> np.ndarray:
    axis = 0 if name == 'core' else 1
    return np.stack(np.split(array, devices, axis))

  return {name: split(name, array) for name, array in batch.items()}


HYPERPARAMS = make_hyperparams(small_config())._replace(gamma=0.9, max_policy_lag=6, kl_coef=0.1)


@functools.cache
def network(core=config_lib.Core.GRU) -> tuple[ActorCritic, Any]:
  config = small_config(core)
  model = make_model(config, ENV)
  return model, random_params(model, ENV, config_lib.core_size(config))


def pmap_update(update: Update) -> Update:
  """An update without minibatches on every local device; donates the state."""
  return jax.pmap(update, axis_name=AXIS, in_axes=(0, 0, None), donate_argnums=0)


@functools.cache
def gradient_update(
  microbatch: int, devices: int, *, pixels=False, adapts_rate=False, **loss: Any
) -> Update:
  """An update by plain gradient descent: with a learning rate of 1 the step is the gradient."""
  config = small_config(config_lib.Core.NONE if pixels else config_lib.Core.GRU)
  for name, value in loss.items():
    setattr(config.loss, name, value)
  if pixels:
    config.model.encoder = config_lib.Encoder.CONV_SIMPLE
  update = make_update(
    make_model(config, PIXELS if pixels else ENV),
    optax.identity(),
    action=ENV.action,
    loss=config.loss,
    microbatch=microbatch,
    adapts_rate=adapts_rate,
    axis_name=None if devices == 1 else AXIS,
  )
  return pmap_update(update) if devices > 1 else jax.jit(update)


def gradient(
  batch: dict[str, np.ndarray],
  hyperparams: Hyperparams = HYPERPARAMS,
  *,
  params: Any = None,
  microbatch=B * (T + 1),
  devices=1,
  **options: Any,
) -> tuple[Any, dict[str, float]]:
  """The unclipped gradient of the mean loss at version 10, and the metrics."""
  params = network()[1] if params is None else params
  state = LearnerState(params, optax.EmptyState(), jnp.int32(10), jnp.ones(()))
  update = gradient_update(microbatch, devices, **options)
  hyperparams = hyperparams._replace(learning_rate=1.0, max_grad_norm=0.0)
  if devices > 1:
    replicas, metrics = update(replicate(state), shared(batch, devices), hyperparams)
    for leaf in jax.tree.leaves((replicas, metrics)):
      np.testing.assert_array_equal(leaf[0], leaf[1], 'the devices do not agree')
    after, metrics = first_replica(replicas), first_replica(metrics)
  else:
    arrays: Any = batch
    after, metrics = update(state, arrays, hyperparams)
  grads = jax.tree.map(lambda old, new: old - np.asarray(new), params, after.params)
  return grads, {name: float(value) for name, value in metrics.items()}


def assert_close(one: Any, other: Any, tolerance=1e-5) -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
  )
