"""The actor-critic: encoder, core and decoder, and the heads for action distribution and value."""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sfjax import config as config_lib
from sfjax.models.cores import make_core
from sfjax.models.encoders import make_encoder
from sfjax.models.layers import Initializer, Mlp, make_initializer, make_layer_options
from sfjax.models.normalizers import Moments, denormalize, init_moments, moments_shape
from sfjax.specs import EnvSpec

Obs = dict[str, jax.Array]

STATISTICS = 'statistics'

# Initial scale of the heads' weights. A policy that starts close to uniform explores and does not
# first have to unlearn an accident: the choice that mattered most of all initial weights in "What
# Matters in On-Policy Reinforcement Learning?" (Andrychowicz et al. 2020, arXiv:2006.05990).
# Values start close to 0, so that first advantages are returns and not noise.
_POLICY_GAIN = 0.01
_VALUE_GAIN = 0.1


class PolicyOutput(NamedTuple):
  """What the network says of each observation; float32 whatever it computes in."""

  logits: jax.Array  # [T, B, num_params + learned_log_std] of the action distribution.
  values: jax.Array  # [T, B] in units of the return, also where the critic's output is not.
  core: jax.Array  # [B, core_size] state after the last step.


class Torso(nn.Module):
  """From observations to what a head reads; called in two parts, see `ActorCritic`."""

  encoder: nn.Module
  core: nn.Module
  decoder: nn.Module

  def encode(self, obs: Obs, moments: Mapping[str, Moments]) -> jax.Array:
    """Encodes observations [N, ...] into features [N, F]."""
    return self.encoder(obs, moments)

  def unroll(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Runs core and decoder over features [T, B, F]; returns [T, B, H] and the next state."""
    hidden, core = self.core(features, core, first)
    return self.decoder(hidden), core


class ActorCritic(nn.Module):
  """One network for acting (T = 1) and for learning (whole trajectories).

  Attributes:
    torso: what the policy head reads.
    critic_torso: what the value head reads, an alike torso with parameters of its own; its
      features and state lie behind those of the actor. None: the value head reads `torso`.
    num_params: numbers of an action distribution that depend on the observation.
    learned_log_std: log standard deviations that do not, parameters themselves; behind the others.
    head_init: initial distribution of the heads' weights.
    normalize_obs: keys of observations to normalise, and the shapes of their statistics.
    normalize_returns: whether the value head's output is normalised.

  Running statistics are variables beside the parameters, in the collection `STATISTICS`: they
  travel with them to checkpoints and inference, and only the update changes them.
  """

  torso: Torso
  critic_torso: Torso | None
  num_params: int
  learned_log_std: int = 0
  head_init: config_lib.Init = config_lib.Init.ORTHOGONAL
  normalize_obs: tuple[tuple[str, tuple[int, ...]], ...] = ()
  normalize_returns: bool = False

  def setup(self) -> None:
    self.policy_head = self._head(self.num_params, make_initializer(self.head_init, _POLICY_GAIN))
    self.value_head = self._head(1, make_initializer(self.head_init, _VALUE_GAIN))
    if self.learned_log_std:
      self.log_std = self.param('log_std', nn.initializers.zeros, (self.learned_log_std,))
    if self.normalize_obs:
      shapes = dict(self.normalize_obs)
      self.obs_moments = self.variable(
        STATISTICS, 'obs', lambda: {key: init_moments(shape) for key, shape in shapes.items()}
      )
    if self.normalize_returns:
      self.return_moments = self.variable(STATISTICS, 'returns', init_moments)

  def _head(self, size: int, kernel_init: Initializer) -> nn.Dense:
    return nn.Dense(size, kernel_init=kernel_init, dtype=jnp.float32)

  def _torsos(self) -> list[Torso]:
    return [self.torso] if self.critic_torso is None else [self.torso, self.critic_torso]

  def encode(self, obs: Obs) -> jax.Array:
    """Encodes observations [N, ...] by key into features [N, F]."""
    moments = self.obs_moments.value if self.normalize_obs else {}
    features = [torso.encode(obs, moments) for torso in self._torsos()]
    return jnp.concatenate(features, axis=-1)

  def unroll(self, features: jax.Array, core: jax.Array, first: jax.Array) -> PolicyOutput:
    """Runs cores and heads over features [T, B, F]; see `sfjax.models.cores` for the arguments."""
    torsos = self._torsos()
    parts = jnp.split(features, len(torsos), axis=-1), jnp.split(core, len(torsos), axis=-1)
    hidden, cores = zip(
      *(torso.unroll(x, state, first) for torso, x, state in zip(torsos, *parts, strict=True)),
      strict=True,
    )
    logits = self.policy_head(hidden[0])
    if self.learned_log_std:
      log_std = jnp.broadcast_to(self.log_std, (*logits.shape[:-1], self.learned_log_std))
      logits = jnp.concatenate([logits, log_std], axis=-1)
    values = jnp.squeeze(self.value_head(hidden[-1]), axis=-1)
    if self.normalize_returns:
      values = denormalize(self.return_moments.value, values)
    return PolicyOutput(logits, values, jnp.concatenate(cores, axis=-1))

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
  config_lib.check_encoder(config, env.obs)
  model = config.model

  def torso() -> Torso:
    decoder = Mlp(tuple(model.decoder_layers), make_layer_options(model))
    core = make_core(model, config.learner.bptt)
    return Torso(make_encoder(model, env.obs), core, decoder)

  learned = 0 if model.adaptive_stddev else env.action.num_dims
  return ActorCritic(
    torso=torso(),
    critic_torso=torso() if model.separate_critic else None,
    num_params=env.action.num_params - learned,
    learned_log_std=learned,
    head_init=model.init,
    normalize_obs=tuple((key, moments_shape(env.obs[key].shape)) for key in model.normalize_obs),
    normalize_returns=model.normalize_returns,
  )


def init_params(model: ActorCritic, key: jax.Array, env: EnvSpec, core_size: int):
  """Returns fresh parameters and statistics; works under jit and `jax.eval_shape`."""
  obs = {name: jnp.zeros((1, *spec.shape), spec.dtype) for name, spec in env.obs.items()}
  return model.init(key, obs, jnp.zeros((1, core_size)), jnp.ones((1,), bool))
