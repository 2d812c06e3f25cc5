"""Numbers that explain learning from old samples: how far policies have moved apart, how old
samples are, and what part of the loss is theirs. Over the samples of all devices."""

import chex
import jax
import jax.numpy as jnp

from sfjax.losses.masked import masked_mean, masked_sum, psum

# The largest of a lag in updates, and how a metric's name says so.
LAG_BUCKETS = ((1, '0_1'), (4, '2_4'), (9, '5_9'), (None, '10_up'))
MAX_LAG = 1023  # A quantile above it is told as this.

# Ratios 1 % apart, from e^-2.56 = 0.077 to e^2.56 = 12.9; those outside count as the nearest.
_LOG_RATIO_STEP = 0.01
_LOG_RATIO_BINS = 256  # On either side of ratio 1.


def histogram(
  bins: jax.Array, mask: jax.Array, *, num_bins: int, axis_name: str | None = None
) -> jax.Array:
  """Counts the true places of a mask by bin, on all devices.

  Args:
    bins: int [...] bin of each entry; one outside the range counts as the nearest.
    mask: bool [...] which entries count.
    num_bins: their number.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    [num_bins] counts, in float32.
  """
  chex.assert_equal_shape([bins, mask])
  counts = jnp.zeros(num_bins).at[jnp.clip(bins, 0, num_bins - 1)].add(mask.astype(jnp.float32))
  return psum(counts, axis_name)


def quantile_bin(counts: jax.Array, q: float) -> jax.Array:
  """Returns the first bin of [num_bins] counts up to which lies at least a share q of all."""
  reached = jnp.cumsum(counts)
  return jnp.sum(reached < q * reached[-1])


def lag_quantiles(
  lag: jax.Array, mask: jax.Array, *, axis_name: str | None = None
) -> dict[str, jax.Array]:
  """Computes quantiles of a lag, exact up to `MAX_LAG`.

  Args:
    lag: int [...] updates between acting and learning.
    mask: bool [...] which entries count.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    `p50` and `p90`, in updates; 0 where no entry counts.
  """
  counts = histogram(lag, mask, num_bins=MAX_LAG + 1, axis_name=axis_name)
  return {'p50': quantile_bin(counts, 0.5), 'p90': quantile_bin(counts, 0.9)}


def ratio_metrics(
  log_ratio: jax.Array, valid: jax.Array, *, axis_name: str | None = None
) -> dict[str, jax.Array]:
  """Describes the distribution of π/μ.

  Args:
    log_ratio: [T, ...] log π(a|x) - log μ(a|x).
    valid: bool [T, ...] which steps count.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    `ratio_p05`, `ratio_p50` and `ratio_p95`, each within ½ % and between 0.077 and 12.9;
    `ratio_max`, exact; `effective_sample_share`, (Σρ)² / (n Σρ²) of the ratios before V-trace
    caps them: the share of samples that would tell as much if all weighed the same.
  """
  log_ratio = jnp.where(valid, log_ratio, 0.0)
  ratio = jnp.exp(log_ratio)
  steps = jnp.clip(log_ratio / _LOG_RATIO_STEP, -_LOG_RATIO_BINS, _LOG_RATIO_BINS)
  bins = jnp.round(steps).astype(jnp.int32) + _LOG_RATIO_BINS
  counts = histogram(bins, valid, num_bins=2 * _LOG_RATIO_BINS + 1, axis_name=axis_name)
  largest = jnp.max(jnp.where(valid, ratio, 0.0))
  if axis_name is not None:
    largest = jax.lax.pmax(largest, axis_name)
  means = masked_mean((ratio, jnp.square(ratio)), valid, axis_name=axis_name)
  metrics = {
    f'ratio_p{percent:02d}': jnp.exp(
      _LOG_RATIO_STEP * (quantile_bin(counts, percent / 100) - _LOG_RATIO_BINS)
    )
    for percent in (5, 50, 95)
  }
  return metrics | {
    'ratio_max': largest,
    'effective_sample_share': jnp.square(means[0]) / jnp.where(means[1] > 0, means[1], 1.0),
  }


def lag_bucket_metrics(
  per_step: dict[str, jax.Array],
  lag: jax.Array,
  valid: jax.Array,
  *,
  axis_name: str | None = None,
) -> dict[str, jax.Array]:
  """Divides means over valid samples into the parts of samples of different lag.

  A part is the sum over its samples divided by the count of *all* valid samples: parts add up
  to the mean, and stay right when averaged over updates. Divided by the share of its samples, it
  is the mean over them.

  Args:
    per_step: arrays [T, ...] by name.
    lag: int [T, ...] updates between acting and learning.
    valid: bool [T, ...] which steps count.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    `<name>_lag_<bucket>` for every array, and `share_lag_<bucket>`, of the buckets 0_1, 2_4,
    5_9 and 10_up.
  """
  chex.assert_equal_shape([lag, valid, *per_step.values()])
  sums, least = {}, None
  for most, bucket in LAG_BUCKETS:
    inside = valid if least is None else valid & (lag >= least)
    inside = inside if most is None else inside & (lag <= most)
    for name, x in (per_step | {'share': jnp.ones_like(valid, jnp.float32)}).items():
      sums[f'{name}_lag_{bucket}'] = masked_sum(x, inside)
    least = None if most is None else most + 1
  sums, count = psum((sums, masked_sum(1.0, valid)), axis_name)
  return {name: total / jnp.maximum(count, 1.0) for name, total in sums.items()}
