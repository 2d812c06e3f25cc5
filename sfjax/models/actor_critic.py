"""The actor-critic: encoder, core, and the heads for action logits and value."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sfjax import config as config_lib
from sfjax.models.cores import GRU, NoCore
from sfjax.models.encoders import ConvEncoder, MlpEncoder
from sfjax.specs import EnvSpec

Obs = dict[str, jax.Array]


class PolicyOutput(NamedTuple):
  """What the network says of each observation."""

  logits: jax.Array  # [T, B, num_actions].
  values: jax.Array  # [T, B].
  core: jax.Array  # [B, core_size] state after the last step.


class ActorCritic(nn.Module):
  """One network for acting (T = 1) and for learning (whole trajectories)."""

  encoder: nn.Module
  core: nn.Module
  num_actions: int

  def setup(self) -> None:
    orthogonal = nn.initializers.orthogonal
    self.policy_head = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))
    self.value_head = nn.Dense(1, kernel_init=orthogonal(0.1))

  def encode(self, obs: Obs) -> jax.Array:
    """Encodes observations [N, ...] into features [N, F]."""
    return self.encoder(obs['obs'])

  def unroll(self, features: jax.Array, core: jax.Array, first: jax.Array) -> PolicyOutput:
    """Runs core and heads over features [T, B, F]; see `GRU` for the arguments."""
    hidden, core = self.core(features, core, first)
    values = jnp.squeeze(self.value_head(hidden), axis=-1)
    return PolicyOutput(self.policy_head(hidden), values, core)

  def __call__(self, obs: Obs, core: jax.Array, first: jax.Array) -> PolicyOutput:
    """Runs one step on a batch of streams.

    Args:
      obs: [N, ...] by key.
      core: [N, core_size].
      first: [N] true where an episode starts.

    Returns:
      Outputs with T = 1.
    """
    return self.unroll(self.encode(obs)[None], core, first[None])


def make_model(config: config_lib.Config, env: EnvSpec) -> ActorCritic:
  """Builds the network a configuration describes.

  Raises:
    ValueError: it does not fit the environment.
  """
  config_lib.check_encoder(config, env.obs['obs'].shape)
  model = config.model
  if model.encoder is config_lib.Encoder.CONV:
    encoder = ConvEncoder(size=model.encoder_size)
  else:
    encoder = MlpEncoder(layers=tuple(model.mlp_layers))
  core = GRU(size=model.core_size) if model.core is config_lib.Core.GRU else NoCore()
  return ActorCritic(encoder=encoder, core=core, num_actions=env.num_actions)


def init_params(model: ActorCritic, key: jax.Array, env: EnvSpec, core_size: int):
  """Returns fresh parameters; works under jit and `jax.eval_shape`."""
  obs = {name: jnp.zeros((1, *spec.shape), spec.dtype) for name, spec in env.obs.items()}
  return model.init(key, obs, jnp.zeros((1, core_size)), jnp.ones((1,), bool))
