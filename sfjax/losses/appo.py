"""The loss of asynchronous PPO: turns a batch of trajectory facts and the current networks'
outputs into one scalar, composed of the other functions of this folder. Reads what the slab
stores; the learner differentiates the result with respect to the network outputs."""

import chex
import jax
import jax.numpy as jnp

from sfjax.losses.diagnostics import lag_bucket_metrics, ratio_metrics
from sfjax.losses.exploration import entropy_loss
from sfjax.losses.gae import GAEOutput, gae
from sfjax.losses.masked import masked_mean, masked_moments, masked_sum, psum
from sfjax.losses.surrogate import clipped_surrogate_loss, policy_gradient_loss
from sfjax.losses.transitions import neutral_transitions
from sfjax.losses.value import clipped_value_loss
from sfjax.losses.vtrace import vtrace

Scalar = float | jax.Array  # Population training traces these; never branch on one.

_STD_FLOOR = 1e-5
# exp overflows at 88, where even a clipped step has the gradient 0 · inf = NaN.
_MAX_LOG_RATIO = 20.0


def appo_loss(
  log_prob_tm1: jax.Array,
  entropy_tm1: jax.Array,
  values: jax.Array,
  behaviour_log_prob: jax.Array,
  behaviour_value: jax.Array,
  rewards: jax.Array,
  terminated: jax.Array,
  played: jax.Array,
  valid: jax.Array,
  first: jax.Array,
  exploration_tm1: jax.Array | None = None,
  kl_tm1: jax.Array | None = None,
  lag_tm1: jax.Array | None = None,
  prepared: GAEOutput | None = None,
  *,
  return_deviation: Scalar = 1.0,
  gamma: Scalar,
  use_vtrace: bool = True,
  use_clip: bool = True,
  rho_bar: Scalar = 1.0,
  c_bar: Scalar = 1.0,
  vtrace_lambda: Scalar = 1.0,
  gae_lambda: Scalar = 0.95,
  ratio_min: Scalar = 1 / 1.1,
  ratio_max: Scalar = 1.1,
  value_coef: Scalar = 0.5,
  value_clip: Scalar = 0.2,
  exploration_coef: Scalar = 0.003,
  kl_coef: Scalar = 0.0,
  normalize_advantages: bool = True,
  axis_name: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
  """Computes the loss of a batch: the policy's, and with their weights those of value,
  exploration and distance from the policy that acted.

  Every mean is over the valid samples of all devices. The loss is this device's sum
  over the global count, so adding losses (or gradients) over devices gives the mean;
  metrics are added up already. Whatever invalid slots hold changes neither. A batch
  without a valid sample has loss and gradient 0.

  V-trace is computed here, from the ratios and values given; so is GAE, unless `prepared`
  holds what it gave before the first of several updates on a batch. Advantages are
  normalised over the samples of this call: of a minibatch, over the minibatch.

  Differs from the papers: π/μ is capped at e^20, so that a stale sample cannot overflow.

  Args:
    log_prob_tm1: [T, ...] log π(a|x) of the stored action under the current policy.
    entropy_tm1: [T, ...] entropy of the current policy, in nats.
    values: [T+1, ...] current critic of every observation, final ones included.
    behaviour_log_prob: [T, ...] log μ(a|x) when the action was taken.
    behaviour_value: [T, ...] the critic then; serves value clipping alone.
    rewards: [T, ...] reward received for the action.
    terminated: bool [T, ...] the action ended the episode for good.
    played: bool [T, ...] an action was taken in the slot.
    valid: bool [T, ...] the sample may be trained on; false where not played.
    first: bool [T+1, ...] the slot's observation is an episode's first.
    exploration_tm1: [T, ...] exploration loss, lower where the policy is more random; None:
      minus the entropy.
    kl_tm1: [T, ...] KL(π‖μ) in nats; None: not known, and no penalty.
    lag_tm1: int [T, ...] updates between acting and learning, for metrics alone; None: not
      known.
    prepared: targets and advantages [T, ...] of GAE; None: computed here. V-trace has none.
    return_deviation: what value losses and advantages are divided by: the running deviation
      of returns where they are normalised.
    gamma: discount per step.
    use_vtrace: V-trace for targets and advantages; False: GAE.
    use_clip: the clipped surrogate; False: the plain policy gradient, of IMPALA with
      V-trace (advantages weighted by min(rho_bar, π/μ)) and of A2C with GAE.
    rho_bar: V-trace's cap on ρ.
    c_bar: V-trace's cap on the trace coefficients.
    vtrace_lambda: V-trace's λ.
    gae_lambda: GAE's λ.
    ratio_min: lower end of the surrogate's range of π/μ.
    ratio_max: upper end of the surrogate's range of π/μ.
    value_coef: weight of the value loss.
    value_clip: largest change of a value that pays, in units of `return_deviation`.
    exploration_coef: weight of the exploration loss, per nat.
    kl_coef: weight of KL(π‖μ), per nat.
    normalize_advantages: scale them to mean 0 and standard deviation 1 first.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    The loss to differentiate, scalar metrics, and the critic's targets [T, ...], which mean
    nothing where a step is not valid. `approx_kl` estimates KL(μ‖π) in nats and
    `kl` is the mean of `kl_tm1`; `clipped_share` is the share of samples whose ratio left its
    range, `valid_share` that of slots which held a valid sample; `rho_mean` is the mean
    capped ratio; `explained_variance` is 1 - Var(target - value) / Var(target), 1 at best;
    `advantage_*` are taken before normalisation. For the others see `ratio_metrics` and
    `lag_bucket_metrics`.
  """
  chex.assert_equal_shape(
    [log_prob_tm1, entropy_tm1, behaviour_log_prob, behaviour_value, rewards, valid]
  )
  valid = valid & played
  transitions = neutral_transitions(values, rewards, terminated, played, valid, first, gamma=gamma)
  v_tm1 = transitions.v_tm1
  log_prob, behaviour_log_prob, entropy, behaviour_v = (
    jnp.where(valid, x, 0.0)
    for x in (log_prob_tm1, behaviour_log_prob, entropy_tm1, behaviour_value)
  )
  log_ratio = jnp.minimum(log_prob - behaviour_log_prob, _MAX_LOG_RATIO)
  ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
  rho = jnp.minimum(rho_bar, ratio)

  if use_vtrace:
    caps = {'rho_bar': rho_bar, 'c_bar': c_bar, 'lambda_': vtrace_lambda}
    targets, advantages = vtrace(*transitions, ratio, **caps)
  elif prepared is None:
    targets, advantages = gae(*transitions, lambda_=gae_lambda)
  else:
    chex.assert_equal_shape([valid, *prepared])
    targets, advantages = (jnp.where(valid, x, 0.0) for x in jax.lax.stop_gradient(prepared))
  moments = masked_moments(
    {'advantage': advantages, 'target': targets, 'error': targets - v_tm1},
    valid,
    axis_name=axis_name,
  )
  if normalize_advantages:
    mean, std = moments['advantage']
    advantages = (advantages - mean) / jnp.maximum(std, _STD_FLOOR * return_deviation)
  else:
    advantages = advantages / return_deviation

  if use_clip:
    clip_range = {'ratio_min': ratio_min, 'ratio_max': ratio_max}
    policy_loss = clipped_surrogate_loss(log_ratio, advantages, **clip_range)
  else:
    weights = rho if use_vtrace else 1.0
    policy_loss = policy_gradient_loss(log_prob, weights * advantages)
  in_deviations = (x / return_deviation for x in (v_tm1, behaviour_v, targets))
  value_loss = clipped_value_loss(*in_deviations, clip=value_clip)
  if exploration_tm1 is None:
    exploration_loss = entropy_loss(entropy)
  else:
    chex.assert_equal_shape([valid, exploration_tm1])
    exploration_loss = jnp.where(valid, exploration_tm1, 0.0)
  step_loss = policy_loss + value_coef * value_loss + exploration_coef * exploration_loss
  per_step = {
    'policy_loss': policy_loss,
    'value_loss': value_loss,
    'exploration_loss': exploration_loss,
    'entropy': entropy,
    # "Approximating KL Divergence" (Schulman 2020), estimator k3: no sample is negative.
    'approx_kl': jnp.expm1(log_ratio) - log_ratio,
    'ratio_mean': ratio,
    'clipped_share': jnp.where((ratio < ratio_min) | (ratio > ratio_max), 1.0, 0.0),
    'value_mean': v_tm1,
    'rho_mean': rho,
  }
  if kl_tm1 is not None:
    chex.assert_equal_shape([valid, kl_tm1])
    per_step['kl'] = jnp.where(valid, kl_tm1, 0.0)
    step_loss += kl_coef * per_step['kl']
  per_step['loss'] = step_loss
  count = psum(masked_sum(1.0, valid), axis_name)
  loss = masked_sum(step_loss, valid) / jnp.maximum(count, 1.0)

  per_step = jax.lax.stop_gradient(per_step)
  metrics = _metrics(per_step, moments, valid, axis_name)
  metrics |= ratio_metrics(jax.lax.stop_gradient(log_ratio), valid, axis_name=axis_name)
  if lag_tm1 is not None:
    by_lag = {name: per_step[name] for name in ('policy_loss', 'value_loss')}
    metrics |= lag_bucket_metrics(by_lag, lag_tm1, valid, axis_name=axis_name)
  return loss, metrics, targets


def _metrics(
  per_step: dict[str, jax.Array],
  moments: dict[str, tuple[jax.Array, jax.Array]],
  valid: jax.Array,
  axis_name: str | None,
) -> dict[str, jax.Array]:
  """Averages per-step numbers over all devices and adds those that are no plain mean."""
  metrics = masked_mean(per_step, valid, axis_name=axis_name)
  valid_count, slots = psum((masked_sum(1.0, valid), jnp.float32(valid.size)), axis_name)
  target_mean, target_std = moments['target']
  unexplained = moments['error'][1] / jnp.where(target_std > 0, target_std, 1.0)
  return metrics | {
    'explained_variance': jnp.where(target_std > 0, 1.0 - jnp.square(unexplained), 0.0),
    'advantage_mean': moments['advantage'][0],
    'advantage_std': moments['advantage'][1],
    'target_mean': target_mean,
    'valid_count': valid_count,
    'valid_share': valid_count / slots,
  }
