"""The update: a pure function from a learner's state and a batch to the next state.

One device program, replicated by pmap: encoder over micro-batches, core and heads over whole
trajectories, loss, gradient summed over devices, optimizer step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfjax import config as config_lib
from sfjax.learner import optimizer as optimizer_lib
from sfjax.losses import appo_loss
from sfjax.models import distributions
from sfjax.models.actor_critic import ActorCritic

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Update = Callable[['LearnerState', Batch, 'Hyperparams'], tuple['LearnerState', Metrics]]

AXIS = 'devices'


class LearnerState(NamedTuple):
  """Everything an update changes."""

  params: Any
  opt_state: optax.OptState
  version: jax.Array  # [] int32, updates so far.


class Hyperparams(NamedTuple):
  """Coefficients that may change between updates without a recompilation."""

  learning_rate: float
  max_grad_norm: float
  max_policy_lag: int
  gamma: float
  rho_bar: float
  c_bar: float
  gae_lambda: float
  ratio_min: float
  ratio_max: float
  value_coef: float
  value_clip: float
  entropy_coef: float


def make_hyperparams(config: config_lib.Config) -> Hyperparams:
  """Collects the traced coefficients of a configuration."""
  loss, learner = config.loss, config.learner
  return Hyperparams(
    learning_rate=learner.learning_rate,
    max_grad_norm=learner.max_grad_norm,
    max_policy_lag=learner.max_policy_lag,
    gamma=loss.gamma,
    rho_bar=loss.rho_bar,
    c_bar=loss.c_bar,
    gae_lambda=loss.gae_lambda,
    ratio_min=1.0 / (1.0 + loss.clip_ratio),
    ratio_max=1.0 + loss.clip_ratio,
    value_coef=loss.value_coef,
    value_clip=loss.value_clip,
    entropy_coef=loss.entropy_coef,
  )


def init_state(params: Any, optimizer: optax.GradientTransformation) -> LearnerState:
  """Returns the state before the first update."""
  return LearnerState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def default_microbatch(observations: int, platform: str) -> int:
  """Observations the encoder sees at once.

  On the CPU the largest divisor of `observations` up to 32, whose activations stay in the cache;
  everything on an accelerator.
  """
  if platform != 'cpu':
    return observations
  return max(n for n in range(1, 33) if observations % n == 0)


def encode_batch(model: ActorCritic, params: Any, batch: Batch, microbatch: int) -> jax.Array:
  """Encodes the [T+1, B] observations of a batch, `microbatch` at a time, into [T+1, B, F].

  Activations of the encoder are computed again for the gradient instead of kept: they would not
  fit the cache.
  """
  shape = batch['first'].shape
  obs = {
    name.removeprefix('obs/'): array.reshape(-1, microbatch, *array.shape[2:])
    for name, array in batch.items()
    if name.startswith('obs/')
  }

  @jax.checkpoint
  def encode(obs: dict[str, jax.Array]) -> jax.Array:
    return model.apply(params, obs, method='encode')  # pyright: ignore[reportReturnType]

  return jax.lax.map(encode, obs).reshape(*shape, -1)


def _losses(
  params: Any,
  batch: Batch,
  valid: jax.Array,
  hyperparams: Hyperparams,
  *,
  model: ActorCritic,
  loss: config_lib.LossConfig,
  microbatch: int,
  axis_name: str | None,
) -> tuple[jax.Array, Metrics]:
  features = encode_batch(model, params, batch, microbatch)
  output: Any = model.apply(params, features, batch['core'], batch['first'], method='unroll')
  logits = output.logits[:-1]
  return appo_loss(
    log_prob_tm1=distributions.log_prob(logits, batch['actions']),
    entropy_tm1=distributions.entropy(logits),
    values=output.values,
    behaviour_log_prob=batch['behaviour_log_prob'],
    behaviour_value=batch['behaviour_value'],
    rewards=batch['rewards'],
    terminated=batch['terminated'],
    first=batch['first'],
    played=batch['played'],
    valid=valid,
    gamma=hyperparams.gamma,
    use_vtrace=loss.use_vtrace,
    use_clip=loss.use_clip,
    rho_bar=hyperparams.rho_bar,
    c_bar=hyperparams.c_bar,
    gae_lambda=hyperparams.gae_lambda,
    ratio_min=hyperparams.ratio_min,
    ratio_max=hyperparams.ratio_max,
    value_coef=hyperparams.value_coef,
    value_clip=hyperparams.value_clip,
    entropy_coef=hyperparams.entropy_coef,
    normalize_advantages=loss.normalize_advantages,
    axis_name=axis_name,
  )


def lag_metrics(version: jax.Array, batch: Batch, axis_name: str | None) -> Metrics:
  """Lag of the played slots in updates: mean, maximum, and the mean's two causes.

  Args:
    version: [] the learner's now.
    batch: `version`, `learner_version` and `played` [T, B].
    axis_name: pmap axis whose devices share the batch; None for one device.
  """
  played = batch['played']
  stale, backlog = batch['learner_version'] - batch['version'], version - batch['learner_version']
  per_slot = jnp.stack([stale, backlog, jnp.ones_like(stale)])
  total = jnp.sum(jnp.where(played[None], per_slot, 0), axis=(1, 2)).astype(jnp.float32)
  largest = jnp.max(jnp.where(played, stale + backlog, 0))
  if axis_name is not None:
    total, largest = jax.lax.psum(total, axis_name), jax.lax.pmax(largest, axis_name)
  stale_mean, backlog_mean = total[:2] / jnp.maximum(total[2], 1.0)
  return {
    'played_count': total[2],
    'lag_updates_mean': stale_mean + backlog_mean,
    'lag_updates_max': largest,
    'lag_updates_stale_mean': stale_mean,
    'lag_updates_backlog_mean': backlog_mean,
  }


def make_update(
  model: ActorCritic,
  optimizer: optax.GradientTransformation,
  *,
  loss: config_lib.LossConfig,
  microbatch: int,
  axis_name: str | None = AXIS,
) -> Update:
  """Returns `update(state, batch, hyperparams) -> (state, metrics)`.

  A batch holds `obs/<key>` [T+1, B, ...], `first` [T+1, B], `actions`, `behaviour_log_prob`,
  `behaviour_value`, `rewards`, `terminated`, `played`, `version`, `learner_version` [T, B] and
  `core` [B, core_size]; under pmap it is this device's share. Samples acted more than
  `max_policy_lag` updates ago are not trained on. An update that is not finite, or has no valid
  sample, leaves the state as it was and reports `applied` 0.
  """

  def update(
    state: LearnerState, batch: Batch, hyperparams: Hyperparams
  ) -> tuple[LearnerState, Metrics]:
    version = state.version
    valid = batch['played'] & (version - batch['version'] <= hyperparams.max_policy_lag)
    grads, metrics = jax.grad(_losses, has_aux=True)(
      state.params,
      batch,
      valid,
      hyperparams,
      model=model,
      loss=loss,
      microbatch=microbatch,
      axis_name=axis_name,
    )
    if axis_name is not None:
      grads = jax.lax.psum(grads, axis_name)
    grads, grad_norm = optimizer_lib.clip_by_global_norm(grads, hyperparams.max_grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state)
    params = optimizer_lib.descend(
      state.params, updates, jnp.asarray(hyperparams.learning_rate, jnp.float32)
    )
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics['loss'])
    applied = finite & (metrics['valid_count'] > 0)
    proposed = LearnerState(params, opt_state, state.version + 1)
    state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), proposed, state)
    metrics |= lag_metrics(version, batch, axis_name)
    metrics |= {
      'grad_norm': grad_norm,
      'param_norm': optimizer_lib.global_norm(state.params),
      'finite': finite,
      'applied': applied,
    }
    return state, metrics

  return update
