"""The policy step: one contract for training, evaluation and video."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from sfjax.models import distributions
from sfjax.models.actor_critic import ActorCritic, Obs
from sfjax.specs import ActionSpec

IDENTITY = ('seed', 'policy', 'stream', 'episode', 'step')

Act = Callable[..., 'ActOutput']  # See `make_act`.


class ActOutput(NamedTuple):
  """One action for each of N observations."""

  action: jax.Array  # [N, A] as `ActionSpec.stored`.
  log_prob: jax.Array  # [N] of the action under the policy that drew it.
  value: jax.Array  # [N].
  core: jax.Array  # [N, core_size] state for the next step.
  params: jax.Array  # [N, P] of the distribution.


def _key(identity: jax.Array) -> jax.Array:
  key = jax.random.key(identity[0])
  for i in range(1, len(IDENTITY)):
    key = jax.random.fold_in(key, identity[i])
  return key


def make_act(model: ActorCritic, action: ActionSpec, *, deterministic: bool = False) -> Act:
  """Returns the jitted `act(params, obs, core, first, identity, mask=None) -> ActOutput`.

  Arguments of `act`: `obs` [N, ...] by key; `core` [N, core_size]; `first` [N] true where an
  episode starts; `identity` [N, 5] int32, the integers of `IDENTITY`; `mask` [N, L] the choices
  that are allowed. Action noise depends on the identity alone, never on the place in the batch.
  Deterministic: the likeliest action.
  """
  draw = jax.vmap(partial(distributions.sample, action))

  def act(
    params: Any,
    obs: Obs,
    core: jax.Array,
    first: jax.Array,
    identity: jax.Array,
    mask: jax.Array | None = None,
  ) -> ActOutput:
    output: Any = model.apply(params, obs, core, first)
    of_actions, value = output.logits[0], output.values[0]
    if deterministic:
      actions = distributions.mode(action, of_actions, mask)
    else:
      actions = draw(jax.vmap(_key)(identity), of_actions, mask)
    log_prob = distributions.log_prob(action, of_actions, actions, mask)
    return ActOutput(actions, log_prob, value, output.core, of_actions)

  return jax.jit(act)
