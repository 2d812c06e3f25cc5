"""The loss of asynchronous PPO: turns a batch of trajectory facts and the current networks'
outputs into one scalar, composed of the other functions of this folder. Reads what the slab
stores; the learner differentiates the result with respect to the network outputs."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from sfjax.losses.gae import gae
from sfjax.losses.surrogate import clipped_surrogate_loss, policy_gradient_loss
from sfjax.losses.value import clipped_value_loss
from sfjax.losses.vtrace import vtrace

Scalar = float | jax.Array  # Population training traces these; never branch on one.

_STD_FLOOR = 1e-5
# exp overflows at 88, where even a clipped step has the gradient 0 · inf = NaN.
_MAX_LOG_RATIO = 20.0


class TransitionMasks(NamedTuple):
  discount_t: jax.Array  # [T, ...] γ, or 0 where the episode terminated.
  done_t: jax.Array  # [T, ...] true where the trace stops.


def transition_masks(
  terminated: jax.Array, first: jax.Array, played: jax.Array, *, gamma: Scalar
) -> TransitionMasks:
  """Derives the discount and the episode ends from the stored facts, in this order.

  A truncated episode's final observation takes an unplayed slot, so an end shows as
  `terminated`, or as the next slot being unplayed or the first of an episode. Slot T
  counts as played: no step after it could leak back.

  Args:
    terminated: bool [T, ...] the action ended the episode for good; wins over truncation.
    first: bool [T+1, ...] the slot's observation is an episode's first.
    played: bool [T, ...] an action was taken in the slot.
    gamma: discount per step, in [0, 1].

  Returns:
    The discount for the next value, and where the trace stops; unplayed slots are not
    yet made neutral.
  """
  chex.assert_type([terminated, first, played], bool)
  chex.assert_equal_shape([terminated, played, first[1:]])
  discount_t = jnp.where(terminated, 0.0, gamma)
  next_unplayed = jnp.concatenate([~played[1:], jnp.zeros_like(played[:1])])
  return TransitionMasks(discount_t, terminated | first[1:] | next_unplayed)


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
  *,
  gamma: Scalar,
  use_vtrace: bool = True,
  use_clip: bool = True,
  rho_bar: Scalar = 1.0,
  c_bar: Scalar = 1.0,
  gae_lambda: Scalar = 0.95,
  ratio_min: Scalar = 1 / 1.1,
  ratio_max: Scalar = 1.1,
  value_coef: Scalar = 0.5,
  value_clip: Scalar = 0.2,
  entropy_coef: Scalar = 0.003,
  normalize_advantages: bool = True,
  axis_name: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Computes the loss of a batch: policy + value_coef · value - entropy_coef · entropy.

  Every mean is over the valid samples of all devices. The loss is this device's sum
  over the global count, so adding losses (or gradients) over devices gives the mean;
  metrics are added up already. Whatever invalid slots hold changes neither. A batch
  without a valid sample has loss and gradient 0.

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
    gamma: discount per step.
    use_vtrace: V-trace for targets and advantages; False: GAE.
    use_clip: the clipped surrogate; False: the plain policy gradient, of IMPALA with
      V-trace (advantages weighted by min(rho_bar, π/μ)) and of A2C with GAE.
    rho_bar: V-trace's cap on ρ.
    c_bar: V-trace's cap on the trace coefficients.
    gae_lambda: GAE's λ.
    ratio_min: lower end of the surrogate's range of π/μ.
    ratio_max: upper end of the surrogate's range of π/μ.
    value_coef: weight of the value loss.
    value_clip: largest change of a value that pays, in units of the return.
    entropy_coef: weight of the entropy, per nat.
    normalize_advantages: scale them to mean 0 and standard deviation 1 first.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    The loss to differentiate, and scalar metrics. `approx_kl` estimates KL(μ‖π) in nats;
    `clipped_share` is the share of samples whose ratio left its range, `valid_share`
    that of slots which held a valid sample; `rho_mean` is the mean capped ratio;
    `explained_variance` is 1 - Var(target - value) / Var(target), 1 at best;
    `advantage_*` are taken before normalisation.
  """
  chex.assert_equal_shape(
    [log_prob_tm1, entropy_tm1, behaviour_log_prob, behaviour_value, rewards]
    + [terminated, played, valid, values[1:], first[1:]]
  )
  valid = valid & played
  discount_t, done_t = transition_masks(terminated, first, played, gamma=gamma)
  # Neutral numbers *before* any arithmetic: 0 · NaN is NaN, in gradients too.
  log_prob, behaviour_log_prob, entropy, v_tm1, behaviour_v, r_t, discount_t = (
    jnp.where(valid, x, 0.0)
    for x in (log_prob_tm1, behaviour_log_prob, entropy_tm1, values[:-1])
    + (behaviour_value, rewards, discount_t)
  )
  # Slot t + 1 may be unplayed: its value is then the bootstrap of a truncated episode.
  # After a termination it may never have been written, so nothing reads it.
  v_t = jnp.where(valid & ~terminated, values[1:], 0.0)
  log_ratio = jnp.minimum(log_prob - behaviour_log_prob, _MAX_LOG_RATIO)
  ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
  rho = jnp.minimum(rho_bar, ratio)

  transitions = (v_tm1, v_t, r_t, discount_t, done_t | ~valid)
  if use_vtrace:
    targets, advantages = vtrace(*transitions, ratio, rho_bar=rho_bar, c_bar=c_bar)
  else:
    targets, advantages = gae(*transitions, lambda_=gae_lambda)
  moments = _masked_moments(
    {'advantage': advantages, 'target': targets, 'error': targets - v_tm1}, valid, axis_name
  )
  if normalize_advantages:
    mean, std = moments['advantage']
    advantages = (advantages - mean) / jnp.maximum(std, _STD_FLOOR)

  if use_clip:
    clip_range = {'ratio_min': ratio_min, 'ratio_max': ratio_max}
    policy_loss = clipped_surrogate_loss(log_ratio, advantages, **clip_range)
  else:
    weights = rho if use_vtrace else 1.0
    policy_loss = policy_gradient_loss(log_prob, weights * advantages)
  value_loss = clipped_value_loss(v_tm1, behaviour_v, targets, clip=value_clip)
  step_loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
  count = _psum(masked_sum(1.0, valid), axis_name)
  loss = masked_sum(step_loss, valid) / jnp.maximum(count, 1.0)

  per_step = {
    'loss': step_loss,
    'policy_loss': policy_loss,
    'value_loss': value_loss,
    'entropy': entropy,
    # "Approximating KL Divergence" (Schulman 2020), estimator k3: no sample is negative.
    'approx_kl': jnp.expm1(log_ratio) - log_ratio,
    'ratio_mean': ratio,
    'clipped_share': jnp.where((ratio < ratio_min) | (ratio > ratio_max), 1.0, 0.0),
    'value_mean': v_tm1,
    'rho_mean': rho,
  }
  return loss, _metrics(per_step, ratio, moments, valid, axis_name)


def masked_sum(x: Scalar, mask: jax.Array) -> jax.Array:
  """Sums x [...] where mask [...] is true; numbers elsewhere, NaN too, do not matter."""
  return jnp.sum(jnp.where(mask, x, 0.0))


def masked_mean(tree: Any, mask: jax.Array, *, axis_name: str | None = None) -> Any:
  """Averages every array of `tree` over the true places of a mask, on all devices at once.

  Sums and counts are added over devices before dividing: devices hold different
  numbers of valid samples, so a mean of means would be wrong.

  Args:
    tree: arrays of the mask's shape.
    mask: bool [...] which entries count.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    The tree with a scalar for each array; 0 where no entry counts.
  """
  sums = jax.tree.map(lambda x: masked_sum(x, mask), tree)
  sums, count = _psum((sums, masked_sum(1.0, mask)), axis_name)
  return jax.tree.map(lambda total: total / jnp.maximum(count, 1.0), sums)


def _masked_moments(
  tree: dict[str, jax.Array], mask: jax.Array, axis_name: str | None
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Mean and standard deviation, in two passes: E[x²] - E[x]² cancels in float32."""
  tree = jax.lax.stop_gradient(tree)
  means = masked_mean(tree, mask, axis_name=axis_name)
  squares = jax.tree.map(lambda x, mean: jnp.square(x - mean), tree, means)
  variances = masked_mean(squares, mask, axis_name=axis_name)
  return {name: (means[name], jnp.sqrt(variances[name])) for name in tree}


def _psum(tree: Any, axis_name: str | None) -> Any:
  return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def _metrics(
  per_step: dict[str, jax.Array],
  ratio: jax.Array,
  moments: dict[str, tuple[jax.Array, jax.Array]],
  valid: jax.Array,
  axis_name: str | None,
) -> dict[str, jax.Array]:
  """Averages per-step numbers over all devices and adds those that are no plain mean."""
  metrics = masked_mean(jax.lax.stop_gradient(per_step), valid, axis_name=axis_name)
  ratio_max = jnp.max(jnp.where(valid, ratio, 0.0))
  if axis_name is not None:
    ratio_max = jax.lax.pmax(ratio_max, axis_name)
  valid_count, slots = _psum((masked_sum(1.0, valid), jnp.float32(valid.size)), axis_name)
  target_mean, target_std = moments['target']
  unexplained = moments['error'][1] / jnp.where(target_std > 0, target_std, 1.0)
  return metrics | {
    'ratio_max': ratio_max,
    'explained_variance': jnp.where(target_std > 0, 1.0 - jnp.square(unexplained), 0.0),
    'advantage_mean': moments['advantage'][0],
    'advantage_std': moments['advantage'][1],
    'target_mean': target_mean,
    'valid_count': valid_count,
    'valid_share': valid_count / slots,
  }
