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
from sfjax.learner.policy_terms import policy_terms
from sfjax.learner.schedules import adapt_to_kl, adapted_rate
from sfjax.losses import GAEOutput, appo_loss
from sfjax.losses.diagnostics import lag_quantiles
from sfjax.losses.masked import masked_sum, psum
from sfjax.models.actor_critic import STATISTICS, ActorCritic, PolicyOutput
from sfjax.models.normalizers import deviation, preserve_outputs, update_moments
from sfjax.specs import ActionSpec

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Update = Callable[['LearnerState', Batch, 'Hyperparams'], tuple['LearnerState', Metrics]]

AXIS = 'devices'


class LearnerState(NamedTuple):
  """Everything an update changes."""

  params: Any  # Of the network, and beside them its running statistics, if it has any.
  opt_state: optax.OptState
  version: jax.Array  # [] int32, updates so far.
  rate_factor: jax.Array  # [] float32, of the learning rate where that adapts to the KL.


class Hyperparams(NamedTuple):
  """Coefficients that may change between updates without a recompilation."""

  learning_rate: float
  kl_threshold: float
  min_learning_rate: float
  max_learning_rate: float
  max_grad_norm: float
  max_policy_lag: int
  gamma: float
  rho_bar: float
  c_bar: float
  vtrace_lambda: float
  gae_lambda: float
  ratio_min: float
  ratio_max: float
  value_coef: float
  value_clip: float
  exploration_coef: float
  kl_coef: float


def make_hyperparams(config: config_lib.Config) -> Hyperparams:
  """Collects the traced coefficients of a configuration."""
  loss, learner = config.loss, config.learner
  ratio_min, ratio_max = ratio_limits(loss.clip_ratio, loss.ratio_range)
  return Hyperparams(
    learning_rate=learner.learning_rate,
    kl_threshold=learner.kl_threshold,
    min_learning_rate=learner.min_learning_rate,
    max_learning_rate=learner.max_learning_rate,
    max_grad_norm=learner.max_grad_norm,
    max_policy_lag=learner.max_policy_lag,
    gamma=loss.gamma,
    rho_bar=loss.rho_bar,
    c_bar=loss.c_bar,
    vtrace_lambda=loss.vtrace_lambda,
    gae_lambda=loss.gae_lambda,
    ratio_min=ratio_min,
    ratio_max=ratio_max,
    value_coef=loss.value_coef,
    value_clip=loss.value_clip,
    exploration_coef=loss.exploration_coef,
    kl_coef=loss.kl_coef,
  )


def ratio_limits(clip_ratio: float, ratio_range: config_lib.RatioRange) -> tuple[float, float]:
  """Returns the ends of the range in which the clipped surrogate lets π/μ move."""
  symmetric = ratio_range is config_lib.RatioRange.SYMMETRIC
  return 1.0 - clip_ratio if symmetric else 1.0 / (1.0 + clip_ratio), 1.0 + clip_ratio


def init_state(params: Any, optimizer: optax.GradientTransformation) -> LearnerState:
  """Returns the state before the first update."""
  opt_state = optimizer.init(params['params'])
  return LearnerState(params, opt_state, jnp.zeros((), jnp.int32), jnp.ones(()))


def default_microbatch(observations: int, platform: str, encoder: config_lib.Encoder) -> int:
  """Observations the encoder sees at once.

  On the CPU the largest divisor of `observations` up to 32, or 4 of the ResNet, whose activations
  stay in the cache; everything on an accelerator.
  """
  if platform != 'cpu':
    return observations
  largest = 4 if encoder is config_lib.Encoder.RESNET else 32
  return max(n for n in range(1, largest + 1) if observations % n == 0)


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


def forward(model: ActorCritic, params: Any, batch: Batch, microbatch: int) -> PolicyOutput:
  """Runs the network over the T+1 observations of every trajectory of a batch."""
  features = encode_batch(model, params, batch, microbatch)
  return model.apply(params, features, batch['core'], batch['first'], method='unroll')  # pyright: ignore[reportReturnType]


def lag_and_valid(
  state: LearnerState, batch: Batch, hyperparams: Hyperparams
) -> tuple[jax.Array, jax.Array]:
  """Returns the lag of every slot [T, B], in updates, and whether it holds a sample to train on.

  The lag is that of the batch when it came: our own updates on it do not count.
  """
  lag = batch.get('entry_version', state.version) - batch['version']
  return lag, batch['played'] & (lag <= hyperparams.max_policy_lag)


def _losses(
  trained: Any,
  params: Any,
  batch: Batch,
  lag: jax.Array,
  valid: jax.Array,
  hyperparams: Hyperparams,
  *,
  model: ActorCritic,
  action: ActionSpec,
  loss: config_lib.LossConfig,
  microbatch: int,
  axis_name: str | None,
) -> tuple[jax.Array, tuple[Metrics, Any]]:
  params = params | {'params': trained}
  output = forward(model, params, batch, microbatch)
  terms = policy_terms(
    action,
    output.logits[:-1],
    batch['actions'],
    valid,
    mask=batch.get('action_mask'),
    behaviour_params=batch.get('behaviour_params'),
    exploration=loss.exploration,
  )
  prepared = GAEOutput(batch['targets'], batch['advantages']) if 'targets' in batch else None
  statistics = params.get(STATISTICS, {})
  returns = statistics.get('returns')
  result, metrics, targets = appo_loss(
    **terms._asdict(),
    return_deviation=1.0 if returns is None else deviation(returns),
    values=output.values,
    behaviour_log_prob=batch['behaviour_log_prob'],
    behaviour_value=batch['behaviour_value'],
    rewards=batch['rewards'],
    terminated=batch['terminated'],
    first=batch['first'],
    played=batch['played'],
    valid=valid,
    lag_tm1=lag,
    prepared=prepared,
    gamma=hyperparams.gamma,
    use_vtrace=loss.use_vtrace,
    use_clip=loss.use_clip,
    rho_bar=hyperparams.rho_bar,
    c_bar=hyperparams.c_bar,
    vtrace_lambda=hyperparams.vtrace_lambda,
    gae_lambda=hyperparams.gae_lambda,
    ratio_min=hyperparams.ratio_min,
    ratio_max=hyperparams.ratio_max,
    value_coef=hyperparams.value_coef,
    value_clip=hyperparams.value_clip,
    exploration_coef=hyperparams.exploration_coef,
    kl_coef=hyperparams.kl_coef,
    normalize_advantages=loss.normalize_advantages,
    axis_name=axis_name,
  )
  # A sample counts once, in the first epoch of its batch.
  counted = valid & ~batch.get('seen', jnp.zeros((), bool))
  new = _new_statistics(statistics, batch, targets, counted, axis_name)
  return result, (metrics, new)


def _new_statistics(
  statistics: Any, batch: Batch, targets: jax.Array, counted: jax.Array, axis_name: str | None
) -> Any:
  new = {}
  if 'obs' in statistics:
    new['obs'] = {
      # Slot T is slot 0 of the next trajectory.
      key: update_moments(moments, batch[f'obs/{key}'][:-1], counted, axis_name=axis_name)
      for key, moments in statistics['obs'].items()
    }
  if 'returns' in statistics:
    new['returns'] = update_moments(statistics['returns'], targets, counted, axis_name=axis_name)
  return new


def _with_statistics(network: Any, old: Any, new: Any) -> Any:
  """Parameters and new statistics together; the value head says the same in the new units."""
  if not new:
    return {'params': network}
  if 'returns' in new:
    head = network['value_head']
    kernel, bias = preserve_outputs(head['kernel'], head['bias'], old['returns'], new['returns'])
    network = network | {'value_head': {'kernel': kernel, 'bias': bias}}
  return {'params': network, STATISTICS: new}


def lag_metrics(lag: jax.Array, batch: Batch, axis_name: str | None) -> Metrics:
  """Lag of the played slots in updates and its two causes: mean, quantiles and maximum of each.

  Args:
    lag: [T, B] of every slot.
    batch: `version`, `learner_version` and `played` [T, B].
    axis_name: pmap axis whose devices share the batch; None for one device.
  """
  played = batch['played']
  stale = batch['learner_version'] - batch['version']
  metrics: Metrics = {'played_count': psum(masked_sum(1.0, played), axis_name)}
  for cause, values in (('', lag), ('stale_', stale), ('backlog_', lag - stale)):
    total = psum(masked_sum(values.astype(jnp.float32), played), axis_name)
    largest = jnp.max(jnp.where(played, values, 0))
    if axis_name is not None:
      largest = jax.lax.pmax(largest, axis_name)
    of_cause = {
      'mean': total / jnp.maximum(metrics['played_count'], 1.0),
      **lag_quantiles(values, played, axis_name=axis_name),
      'max': largest,
    }
    metrics |= {f'lag_updates_{cause}{name}': value for name, value in of_cause.items()}
  return metrics


def make_update(
  model: ActorCritic,
  optimizer: optax.GradientTransformation,
  *,
  action: ActionSpec,
  loss: config_lib.LossConfig,
  microbatch: int,
  adapts_rate: bool = False,
  axis_name: str | None = AXIS,
) -> Update:
  """Returns `update(state, batch, hyperparams) -> (state, metrics)`.

  A batch holds `obs/<key>` [T+1, B, ...], `first` [T+1, B], `actions` [T, B, A],
  `behaviour_log_prob`, `behaviour_value`, `rewards`, `terminated`, `played`, `version`,
  `learner_version` [T, B] and `core` [B, core_size]; under pmap it is this device's share. Where
  actions are masked it has `action_mask` [T, B, L], and for an exact KL to the policy that acted
  that policy's distribution, `behaviour_params` [T, B, P]. Samples acted more than
  `max_policy_lag` updates ago are not trained on. An update that is not finite, or has no valid
  sample, leaves the state as it was and reports `applied` 0.

  With `adapts_rate` the learning rate follows the KL of each update, see `adapt_to_kl`. Running
  statistics read the batch as they were when it came and are updated by its valid samples.

  V-trace is computed under the parameters that enter this update. So is GAE where this is the
  only update on the batch; before several, `make_prepare` has computed it once for all.
  """

  def update(
    state: LearnerState, batch: Batch, hyperparams: Hyperparams
  ) -> tuple[LearnerState, Metrics]:
    lag, valid = lag_and_valid(state, batch, hyperparams)
    network = state.params['params']
    grads, (metrics, statistics) = jax.grad(_losses, has_aux=True)(
      network,
      state.params,
      batch,
      lag,
      valid,
      hyperparams,
      model=model,
      action=action,
      loss=loss,
      microbatch=microbatch,
      axis_name=axis_name,
    )
    if axis_name is not None:
      grads = jax.lax.psum(grads, axis_name)
    grads, grad_norm = optimizer_lib.clip_by_global_norm(grads, hyperparams.max_grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, network)
    rate, rate_factor = jnp.asarray(hyperparams.learning_rate, jnp.float32), state.rate_factor
    if adapts_rate:
      limits: Any = {
        'base_rate': rate,
        'min_rate': hyperparams.min_learning_rate,
        'max_rate': hyperparams.max_learning_rate,
      }
      rate = adapted_rate(rate_factor, **limits)
      threshold = hyperparams.kl_threshold
      rate_factor = adapt_to_kl(rate_factor, metrics['kl'], threshold=threshold, **limits)
    network = optimizer_lib.descend(network, updates, rate)
    params = _with_statistics(network, state.params.get(STATISTICS), statistics)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics['loss'])
    applied = finite & (metrics['valid_count'] > 0)
    proposed = LearnerState(params, opt_state, state.version + 1, rate_factor)
    state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), proposed, state)
    metrics |= lag_metrics(lag, batch, axis_name)
    metrics |= {
      'dropped_share': 1.0 - metrics['valid_count'] / jnp.maximum(metrics['played_count'], 1.0),
      'grad_norm': grad_norm,
      'param_norm': optimizer_lib.global_norm(state.params['params']),
      'learning_rate': rate,
      'finite': finite,
      'applied': applied,
    }
    return state, metrics

  return update
