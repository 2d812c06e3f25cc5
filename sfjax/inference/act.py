"""The policy step: one contract for training, evaluation and video."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfjax.models import distributions
from sfjax.models.actor_critic import ActorCritic, Obs

IDENTITY = ('seed', 'policy', 'stream', 'episode', 'step')

Act = Callable[[Any, Obs, jax.Array, jax.Array, jax.Array], 'ActOutput']


class ActOutput(NamedTuple):
  """One action for each of N observations."""

  action: jax.Array  # [N] int32.
  log_prob: jax.Array  # [N] of the action under the policy that drew it.
  value: jax.Array  # [N].
  core: jax.Array  # [N, core_size] state for the next step.


def _key(identity: jax.Array) -> jax.Array:
  key = jax.random.key(identity[0])
  for i in range(1, len(IDENTITY)):
    key = jax.random.fold_in(key, identity[i])
  return key


def make_act(model: ActorCritic, *, deterministic: bool = False) -> Act:
  """Returns the jitted `act(params, obs, core, first, identity) -> ActOutput`.

  Arguments of `act`: `obs` [N, ...] by key; `core` [N, core_size]; `first` [N] true where an
  episode starts; `identity` [N, 5] int32, the integers of `IDENTITY`. Action noise depends on the
  identity alone, never on the place in the batch. Deterministic: the likeliest action.
  """

  def act(
    params: Any, obs: Obs, core: jax.Array, first: jax.Array, identity: jax.Array
  ) -> ActOutput:
    output = model.apply(params, obs, core, first)
    logits, value = output.logits[0], output.values[0]  # pyright: ignore
    if deterministic:
      action = distributions.mode(logits)
    else:
      action = jax.vmap(distributions.sample)(jax.vmap(_key)(identity), logits)
    log_prob = distributions.log_prob(logits, action)
    return ActOutput(action, log_prob, value, jnp.asarray(output.core))  # pyright: ignore

  return jax.jit(act)
