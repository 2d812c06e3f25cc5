"""Quantiles, effective samples and lag buckets against NumPy and hand-worked numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.losses.diagnostics import MAX_LAG, lag_bucket_metrics, lag_quantiles, ratio_metrics

quantiles_of = jax.jit(lag_quantiles)
ratios_of = jax.jit(ratio_metrics)


@pytest.mark.parametrize('count', (1, 2, 9, 10, 11, 400))
def test_lag_quantiles_are_exact(count):
  """Catches a share that is taken of all slots, and a bin too many or too few."""
  rng = np.random.default_rng(count)
  lag = rng.integers(0, 60, count).astype(np.int32)
  padded = np.concatenate([lag, np.full(7, 900, np.int32)])
  out = quantiles_of(padded, np.arange(count + 7) < count)
  for name, q in (('p50', 0.5), ('p90', 0.9)):
    assert out[name] == np.quantile(lag, q, method='inverted_cdf'), name


def test_a_lag_beyond_the_last_bin_is_told_as_the_last():
  """Catches a scatter that drops what is out of range, and an empty mask that fails."""
  lag = np.array([5, MAX_LAG + 500, 10**9], np.int32)
  out = quantiles_of(lag, np.ones(3, bool))
  assert (out['p50'], out['p90']) == (MAX_LAG, MAX_LAG)
  assert quantiles_of(lag, np.zeros(3, bool))['p90'] == 0


def test_ratio_quantiles_within_half_a_percent():
  """Catches bins off by half a step, a clip on one side, and an order by something else."""
  rng = np.random.default_rng(0)
  log_ratio = rng.normal(scale=0.4, size=(30, 40)).astype(np.float32)
  valid = rng.random((30, 40)) < 0.5
  out = ratios_of(np.where(valid, log_ratio, np.nan), valid)
  for name, q in (('ratio_p05', 0.05), ('ratio_p50', 0.5), ('ratio_p95', 0.95)):
    expected = np.exp(np.quantile(log_ratio[valid], q, method='inverted_cdf'))
    np.testing.assert_allclose(out[name], expected, rtol=0.0051, err_msg=name)
  np.testing.assert_allclose(out['ratio_max'], np.exp(log_ratio[valid].max()), rtol=1e-6)


def test_an_unmoved_policy_has_ratio_one():
  """Catches bins whose middle is not 1: unchanged policies would look half a percent off."""
  out = ratios_of(np.full((4, 3), 1e-4, np.float32), np.ones((4, 3), bool))
  assert (out['ratio_p05'], out['ratio_p50'], out['ratio_p95']) == (1, 1, 1)
  np.testing.assert_allclose(out['effective_sample_share'], 1.0, rtol=1e-6)


def test_far_ratios_count_as_the_nearest():
  """Catches an index out of range that falls off the histogram."""
  out = ratios_of(np.array([-20.0, 20.0], np.float32), np.ones(2, bool))
  np.testing.assert_allclose([out['ratio_p05'], out['ratio_p95']], np.exp([-2.56, 2.56]), rtol=1e-5)


def test_effective_samples_by_hand():
  """Catches a count of slots, and weights that were capped first."""
  # Ratios 1, 1 and 4: (1 + 1 + 4)² / (3 · (1 + 1 + 16)) = 36 / 54.
  out = ratios_of(np.log(np.array([1, 1, 4, 9], np.float32)), np.array([1, 1, 1, 0], bool))
  np.testing.assert_allclose(out['effective_sample_share'], 36 / 54, rtol=1e-6)
  assert ratios_of(np.zeros(2, np.float32), np.zeros(2, bool))['effective_sample_share'] == 0


def test_lag_buckets_are_parts_of_the_mean():
  """Catches an end of a bucket on the wrong side, and a division by the bucket's own count."""
  lag = np.array([0, 1, 2, 4, 5, 9, 10, 500, 3], np.int32)
  loss = np.array([1, 2, 4, 8, 16, 32, 64, 128, np.nan], np.float32)
  valid = np.arange(9) < 8  # The last would be of the second bucket.
  out = lag_bucket_metrics({'loss': jnp.asarray(loss)}, jnp.asarray(lag), jnp.asarray(valid))
  expected = {'0_1': (1 + 2) / 8, '2_4': (4 + 8) / 8, '5_9': (16 + 32) / 8, '10_up': 192 / 8}
  assert out == {f'loss_lag_{k}': v for k, v in expected.items()} | {
    f'share_lag_{k}': 0.25 for k in expected
  }


def test_devices_together_are_one_batch():
  """Catches quantiles, shares and effective samples of a device's own."""
  rng = np.random.default_rng(1)
  lag = rng.integers(0, 20, (2, 50)).astype(np.int32)
  log_ratio = rng.normal(size=(2, 50)).astype(np.float32)
  lag[1] += 5
  log_ratio[1] += 1
  valid = rng.random((2, 50)) < np.array([[0.9], [0.2]])

  def diagnose(lag, log_ratio, valid, axis_name=None):
    return (
      lag_quantiles(lag, valid, axis_name=axis_name),
      ratio_metrics(log_ratio, valid, axis_name=axis_name),
      lag_bucket_metrics({'x': log_ratio}, lag, valid, axis_name=axis_name),
    )

  both = jax.vmap(functools.partial(diagnose, axis_name='devices'), axis_name='devices')
  parts = jax.jit(both)(lag, log_ratio, valid)
  whole = jax.jit(diagnose)(*(x.reshape(-1) for x in (lag, log_ratio, valid)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, [b, b], rtol=1e-5), parts, whole)
