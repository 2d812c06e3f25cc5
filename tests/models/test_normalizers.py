"""Running statistics against NumPy in float64, over streams cut and divided in any way."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfjax.models.convolution import convolution
from sfjax.models.normalizers import (
  HORIZON,
  Moments,
  denormalize,
  deviation,
  fold_into_convolution,
  init_moments,
  moments_shape,
  normalize,
  preserve_outputs,
  renormalize,
  update_moments,
)

F = 3
update = jax.jit(update_moments)
update_on_devices = jax.pmap(
  functools.partial(update_moments, axis_name='devices'), axis_name='devices', in_axes=(None, 0, 0)
)


def make_moments(mean: Any, var: Any, count=5000.0) -> Moments:
  mean = jnp.asarray(mean, jnp.float32)
  return Moments(jnp.float32(count), mean, jnp.zeros_like(mean), jnp.asarray(var, jnp.float32))


def exact_mean(moments: Moments) -> np.ndarray:
  return np.asarray(moments.mean, np.float64) + np.asarray(moments.mean_low, np.float64)


def check(moments: Moments, samples: np.ndarray, tolerance=1e-5) -> None:
  """Checks statistics [F] against those of samples [N, F]; errors of the mean in deviations."""
  samples = samples.astype(np.float64)
  assert moments.count == len(samples)
  mean, var = samples.mean(axis=0), samples.var(axis=0)
  np.testing.assert_allclose((exact_mean(moments) - mean) / np.sqrt(var), 0, atol=tolerance)
  np.testing.assert_allclose(moments.var, var, rtol=tolerance)


def assert_same_bits(one: Any, other: Any) -> None:
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def stream(seed: int, length: int, *, offset=3.0, drift=2.0) -> np.ndarray:
  """Samples [length, F] of heavy tails, whose mean moves, on three scales."""
  rng = np.random.default_rng(seed)
  noise = rng.standard_t(4, size=(length, F)) + drift * np.linspace(0, 1, length)[:, None]
  return (noise * (0.01, 1.0, 100.0) + offset).astype(np.float32)


# Streams, cut and divided.


@settings(max_examples=25, deadline=None)
@given(
  seed=st.integers(0, 2**31),
  pieces=st.lists(st.sampled_from((1, 2, 7, 40)), min_size=1, max_size=8),
  share=st.floats(0.1, 1.0),
)
def test_a_stream_in_any_pieces_has_the_statistics_of_the_whole(seed, pieces, share):
  """Catches a merge that weighs pieces alike, leaves out the distance of their means, or takes
  the unbiased variance of a piece, which depends on how the stream is cut."""
  samples, rng = stream(seed, sum(pieces) + 2), np.random.default_rng(seed)
  valid = rng.random(len(samples)) < share
  valid[:2] = True
  moments, start = init_moments((F,)), 0
  for length in (2, *pieces):
    part = slice(start, start + length)
    moments = update(moments, samples[part], valid[part])
    start += length
  check(moments, samples[valid])


def test_devices_with_unequal_counts_have_the_statistics_of_all():
  """Catches a mean of means over devices or steps, and a variance around a device's own mean."""
  samples = stream(0, 2 * 2 * 6 * 5).reshape(2, 2, 6, 5, F)  # Batches, devices, T, B.
  samples[:, 1] += 200.0
  valid = np.random.default_rng(1).random((2, 2, 6, 5)) < 0.8
  valid[:, 1, 1:] = False
  valid[:, 0, 3] = False
  counts = valid.sum((0, 2, 3))
  assert counts[0] > 3 * counts[1] > 0
  moments = init_moments((F,))
  for i in range(2):
    replicas = update_on_devices(moments, samples[i], valid[i])
    moments, other = (jax.tree.map(lambda leaf, i=i: leaf[i], replicas) for i in (0, 1))
    assert_same_bits(moments, other)
  check(moments, samples[valid])


def test_a_device_without_a_valid_sample_takes_part():
  """Catches a division by its own count."""
  samples, valid = stream(0, 60).reshape(2, 6, 5, F), np.ones((2, 6, 5), bool)
  valid[1] = False
  replicas = update_on_devices(init_moments((F,)), samples, valid)
  for i in range(2):
    check(jax.tree.map(lambda leaf, i=i: leaf[i], replicas), samples[0].reshape(-1, F))


@pytest.mark.parametrize('offset', (1e6, -3e5))
def test_an_offset_a_million_deviations_large_cancels_nothing(offset):
  """Catches E[x²] - E[x]², a first batch around 0, and a mean that a small step cannot move:
  at 1e6 neighbouring float32 numbers are 1/16 apart."""
  rng = np.random.default_rng(0)
  samples = (rng.normal(size=(200, 50, F)) + offset).astype(np.float32)
  samples += np.linspace(0, 4, 200, dtype=np.float32)[:, None, None]
  moments = init_moments((F,))
  for batch in samples:
    moments = update(moments, batch, np.ones(50, bool))
  check(moments, samples.reshape(-1, F))
  normal = np.asarray(normalize(moments, samples.reshape(-1, F), clip=9.0), np.float64)
  np.testing.assert_allclose(normal.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(normal.std(axis=0), 1, atol=1e-4)


def test_a_number_has_statistics_of_shape_nothing():
  returns = stream(3, 40)[:, 2].reshape(8, 5)
  moments = update(init_moments(), returns, np.ones((8, 5), bool))
  assert moments.mean.shape == ()
  check(jax.tree.map(lambda leaf: leaf.reshape(-1), moments), returns.reshape(-1, 1))


def test_after_a_billion_samples_statistics_are_right_and_still_follow():
  """Catches a count that stands still, a weight too small for float32, and one that never ends
  to shrink: then the statistics could not follow a policy that sees other things."""
  n = 10_000
  batch = stream(4, n, offset=50.0)
  valid = jnp.ones(n, bool)

  @functools.partial(jax.jit, static_argnums=2)
  def feed(moments: Moments, batch: jax.Array, times: int) -> Moments:
    return jax.lax.fori_loop(0, times, lambda _, m: update_moments(m, batch, valid), moments)

  moments = feed(init_moments((F,)), batch, 100)
  moments = feed(moments._replace(count=jnp.float32(1e9)), batch, 100)
  assert moments.count == HORIZON
  check(moments._replace(count=jnp.float32(n)), batch)
  # A step of 2 deviations; after 1.5 horizons of samples e^-1.5 of it is left.
  std = batch.std(axis=0, dtype=np.float64)
  shifted = (batch + 2 * std).astype(np.float32)
  moments = feed(moments, shifted, int(1.5 * HORIZON) // n)
  left = (shifted.mean(axis=0, dtype=np.float64) - exact_mean(moments)) / std
  np.testing.assert_allclose(left, 2 * np.exp(-1.5), rtol=2e-3)


def test_below_the_horizon_every_sample_weighs_the_same():
  """Catches a horizon of another length, and a count that is rounded."""
  moments = make_moments(np.zeros(F), np.ones(F), count=HORIZON - 1001)
  moments = update(moments, np.full((1, F), 4.0, np.float32), np.ones(1, bool))
  assert moments.count == HORIZON - 1000
  np.testing.assert_allclose(exact_mean(moments), 4 / (HORIZON - 1000), rtol=1e-6)


# Images.


def images(seed: int, shape: tuple[int, ...]) -> np.ndarray:
  rng = np.random.default_rng(seed)
  scale = np.array([1.0, 0.5, 0.1]) * rng.random(shape[:2])[..., None, None, None]
  return (rng.random((*shape, 3)) * 255 * scale).astype(np.uint8)


@pytest.mark.parametrize(('as_floats', 'on_cpu'), ((False, True), (True, True), (False, False)))
def test_channels_of_images_are_pooled(as_floats, on_cpu, monkeypatch):
  """Catches bytes that wrap, pixels counted as samples, and the two ways over the steps apart."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu' if on_cpu else 'cuda')
  pixels = images(0, (5, 4, 12, 10))
  valid = np.random.default_rng(1).random((5, 4)) < 0.7
  moments = init_moments(moments_shape(pixels.shape[2:]))
  batch = pixels.astype(np.float32) if as_floats else pixels
  for part in (slice(0, 2), slice(2, 5)):
    moments = jax.jit(update_moments)(moments, batch[part], valid[part])
  assert moments.count == valid.sum()
  check(moments._replace(count=moments.count * 120), pixels[valid].reshape(-1, 3))


def test_images_are_not_copied_to_floats_at_once():
  """Catches a temporary of the size of the batch in float32, 4 bytes a pixel."""
  batch = jax.ShapeDtypeStruct((16, 8, 32, 32, 3), jnp.uint8)
  valid = jax.ShapeDtypeStruct((16, 8), jnp.bool_)
  analysis = update.lower(init_moments((3,)), batch, valid).compile().memory_analysis()
  assert analysis is not None and analysis.temp_size_in_bytes < batch.size


def test_a_convolution_of_bytes_is_that_of_normalised_pixels():
  """Catches a mean that is added, weights divided by 255 again, a channel taken for another."""
  rng = np.random.default_rng(0)
  pixels = images(1, (2, 3, 12, 10)).reshape(6, 12, 10, 3)
  moments = update(init_moments((3,)), pixels, np.ones(6, bool))
  kernel = rng.normal(size=(4, 4, 3, 5)).astype(np.float32)
  bias = rng.normal(size=5).astype(np.float32)
  # The darkest channel's deviation is too small for the byte 255: a fifth of the way is taken.
  mean, std = exact_mean(moments), np.sqrt(moments.var)
  scale = np.maximum(std, (255 - mean) / 5)
  assert scale[2] > 2 * std[2]
  normal = ((pixels - mean) / scale).astype(np.float32)
  assert np.abs(normal).max() <= 5
  expected = (
    convolution(jnp.asarray(normal), jnp.asarray(kernel), stride=2) + bias[None, None, None]
  )
  folded, offset = fold_into_convolution(moments, jnp.asarray(kernel), jnp.asarray(bias))
  out = convolution(jnp.asarray(pixels), folded, stride=2) + offset[None, None, None]
  np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('clip', (5.0, 2.0))
@pytest.mark.parametrize('level', (0, 10, 250, 255))
def test_a_channel_that_never_moved_reads_no_byte_beyond_the_clip(level, clip):
  """Catches weights divided by a deviation of almost 0."""
  moments = update(init_moments((1,)), np.full((3, 4, 4, 1), level, np.uint8), np.ones(3, bool))
  folded, offset = fold_into_convolution(moments, jnp.ones((1, 1, 1, 1)), jnp.zeros(1), clip=clip)
  read = np.arange(256) * folded[0, 0, 0, 0] + offset[0]
  assert np.abs(read).max() == pytest.approx(clip, rel=1e-5)
  assert read[level] == pytest.approx(0, abs=1e-5)


def test_the_mean_is_subtracted_by_the_weights_that_are_used():
  """Catches a bias of weights before they were rounded to bfloat16."""
  kernel = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, 3, 4)), jnp.float32)
  moments = make_moments([200.0, 100.0, 50.0], [900.0, 900.0, 900.0])
  folded, offset = fold_into_convolution(moments, kernel, jnp.zeros(4), dtype=jnp.bfloat16)
  assert folded.dtype == jnp.bfloat16
  mean = np.tile(exact_mean(moments), 64)
  out = mean @ np.asarray(folded, np.float64).reshape(-1, 4) + np.asarray(offset)
  np.testing.assert_allclose(out, 0, atol=1e-4)


# What must leave no trace.


def test_an_empty_batch_leaves_the_statistics_bit_for_bit():
  """Catches 0 / 0, and arithmetic on nothing: 0 for -0, a count cut to a horizon made smaller."""
  moments = update(init_moments((F,)), stream(0, 50, offset=1e5), np.ones(50, bool))
  odd = make_moments(np.full(F, -0.0), np.ones(F), count=2 * HORIZON)
  for before in (moments, init_moments((F,)), odd):
    assert_same_bits(update(before, stream(1, 50), np.zeros(50, bool)), before)
    assert_same_bits(update(before, np.full((50, F), np.nan), np.ones(50, bool)), before)


@pytest.mark.parametrize('garbage', (np.nan, np.inf, -np.inf, 3e38, 7.0))
@pytest.mark.parametrize('trusted', (False, True))
def test_what_invalid_rows_hold_leaves_no_trace(garbage, trusted):
  """Catches arithmetic before the mask: 0 · NaN is NaN."""
  moments = make_moments(np.ones(F), np.ones(F)) if trusted else init_moments((F,))
  samples, valid = stream(0, 40), np.arange(40) % 3 > 0
  expected = update(moments, samples, valid)
  spoiled = samples.copy()
  spoiled[~valid] = garbage
  assert_same_bits(update(moments, spoiled, valid), expected)
  assert np.isfinite(jax.tree.leaves(expected)[1]).all()


@pytest.mark.parametrize('garbage', (np.nan, np.inf, -np.inf))
def test_a_sample_that_is_not_finite_is_left_out(garbage):
  """Catches a NaN that stays in the mean for ever, and the whole batch left out for it."""
  samples, valid = stream(0, 40), np.ones(40, bool)
  samples[7, 1] = samples[20, 0] = garbage
  moments = update(init_moments((F,)), samples, valid)
  check(moments, np.delete(samples, (7, 20), axis=0))


@pytest.mark.parametrize('huge', (1e30, -3e38, 1e6))
def test_one_huge_number_moves_the_statistics_little(huge):
  """Catches one reading of a broken sensor that makes all others 0 for the rest of the run."""
  rng = np.random.default_rng(0)
  samples = rng.normal(size=(100_000, F)).astype(np.float32)
  valid = np.ones(len(samples), bool)
  moments = update(init_moments((F,)), samples, valid)
  spoiled = samples[:1000].copy()
  spoiled[5, 1] = huge
  after = update(moments, spoiled, valid[:1000])
  # 100 deviations in 101,000 samples: 0.001 of the mean, 0.1 of the variance.
  mean, var = exact_mean(after), np.asarray(after.var)
  assert abs(mean[1]) < 0.02 and 1.05 < var[1] < 1.15
  np.testing.assert_allclose(mean[[0, 2]], 0, atol=0.02)
  np.testing.assert_allclose(var[[0, 2]], 1, atol=0.02)


def test_huge_numbers_among_the_first_stay_finite():
  """Catches a sum or a square that overflows to inf, which no later sample could repair."""
  samples = stream(0, 40)
  samples[3:5, 1] = 3e38
  moments = update(init_moments((F,)), samples, np.ones(40, bool))
  assert all(np.isfinite(leaf).all() for leaf in moments)
  moments = update(moments, samples, np.ones(40, bool))
  assert all(np.isfinite(leaf).all() for leaf in moments)
  assert np.isfinite(normalize(moments, jnp.asarray(samples))).all()


@pytest.mark.parametrize('before', (0.0, 1.0))
def test_a_scale_that_really_grows_is_followed(before):
  """Catches a clip relative to a deviation that it keeps from growing, also from 0: what did
  not move at first would count as huge for ever."""
  rng = np.random.default_rng(0)
  valid = np.ones(1000, bool)
  moments = update(
    init_moments((F,)), before * rng.normal(size=(1000, F)).astype(np.float32), valid
  )
  for _ in range(60):
    batch = 1e4 * rng.normal(size=(1000, F)).astype(np.float32)
    moments = update(moments, batch, valid)
  np.testing.assert_allclose(deviation(moments), 1e4, rtol=0.1)


def test_no_gradient_flows_through_statistics():
  """Catches a critic that changes the units instead of its values."""

  def loss(x):
    moments = update_moments(init_moments((F,)), x, jnp.ones(4, bool))
    return jnp.sum(normalize(moments, jnp.ones((4, F)))) + jnp.sum(moments.var)

  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.asarray(stream(0, 4))), 0)


# Use of the statistics.


def test_numbers_are_normalised_within_the_clip():
  """Catches a deviation that is a variance, a clip that is not symmetric, one before dividing."""
  moments = make_moments([1.0, -2.0, 0.0], [4.0, 0.25, 0.0])
  x = jnp.array([[3.0, -2.5, 0.0], [-9.0, 0.4, 1.0], [1e30, -1e30, -1e-3]])
  # (3 - 1) / 2; (-2.5 + 2) / 0.5; 0. (-9 - 1) / 2 = -5; 2.4 / 0.5; 1 / sqrt(1e-5) is above 5.
  expected = [[1.0, -1.0, 0.0], [-5.0, 4.8, 5.0], [5.0, -5.0, -0.316228]]
  np.testing.assert_allclose(normalize(moments, x), expected, rtol=1e-4)
  np.testing.assert_allclose(
    normalize(moments, x, clip=0.5), np.clip(expected, -0.5, 0.5), rtol=1e-4
  )
  np.testing.assert_allclose(normalize(moments, x, clip=jnp.inf)[2, 0], 5e29, rtol=1e-4)
  assert np.isnan(normalize(moments, jnp.full((1, F), np.nan))).all()
  before = jax.tree.map(np.array, moments)
  normalize(moments, x)
  assert_same_bits(moments, before)


def test_before_the_first_sample_numbers_pass():
  x = jnp.asarray([[-4.0, 0.5, 4.0]])
  np.testing.assert_allclose(normalize(init_moments((F,)), x), x, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
  mean=st.floats(-1e3, 1e3, width=32),
  std=st.floats(1e-3, 1e3),
  x=st.floats(-4.875, 4.875, width=32),
)
def test_denormalising_undoes_normalising(mean, std, x):
  moments = make_moments(mean, std**2)._replace(mean_low=jnp.float32(1e-8 * mean))
  raw = denormalize(moments, jnp.float32(x))
  # Rounding of the raw number, seen in deviations.
  tolerance = 1e-5 + 3e-7 * abs(mean) / float(deviation(moments))
  assert float(normalize(moments, raw)) == pytest.approx(x, abs=tolerance)
  again = denormalize(moments, normalize(moments, raw))
  assert float(again) == pytest.approx(float(raw), rel=1e-5, abs=1e-5 * max(std, abs(mean)))


def test_denormalising_adds_the_whole_mean():
  """Catches half of a mean: errors are those of one rounding, at 1e6 half of 1/16 at most."""
  moments = make_moments(1e6, 1.0)._replace(mean_low=jnp.float32(0.03))
  x = np.linspace(-5, 5, 1000, dtype=np.float32)
  raw = np.asarray(denormalize(moments, jnp.asarray(x)), np.float64)
  np.testing.assert_allclose(raw, 1e6 + 0.03 + x.astype(np.float64), atol=1 / 32 + 1e-4, rtol=0)


@settings(max_examples=50, deadline=None)
@given(means=st.tuples(*[st.floats(-100, 100)] * 2), stds=st.tuples(*[st.floats(0.01, 100)] * 2))
def test_new_units_are_those_of_new_statistics(means, stds):
  """Catches units exchanged, and a shift in the old ones."""
  old, new = (make_moments(mean, std**2) for mean, std in zip(means, stds, strict=True))
  x = jnp.asarray([-3.0, 0.0, 0.5, 2.0])
  raw = np.asarray(denormalize(old, x), np.float64)
  expected = (raw - means[1]) / np.sqrt(stds[1] ** 2 + 1e-5)
  size = np.abs(expected).max() + abs(means[0] / stds[1])
  np.testing.assert_allclose(renormalize(x, old, new), expected, rtol=1e-5, atol=1e-5 * size)
  assert_same_bits(renormalize(x, old, old), x)


def test_a_rescaled_value_head_says_the_same_values():
  """Catches critics whose values jump whenever the statistics of returns move."""
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(20, 8)).astype(np.float32)
  kernel = jnp.asarray(rng.normal(size=(8, 1)), jnp.float32)
  bias = jnp.asarray([0.7])
  old, new = make_moments(-3.0, 4.0), make_moments(250.0, 9e4)
  values = denormalize(old, jnp.squeeze(hidden @ kernel + bias[None], -1))
  new_kernel, new_bias = preserve_outputs(kernel, bias, old, new)
  again = denormalize(new, jnp.squeeze(hidden @ new_kernel + new_bias[None], -1))
  np.testing.assert_allclose(again, values, atol=1e-4)
  assert_same_bits(preserve_outputs(kernel, bias, old, old), (kernel, bias))


def test_the_protocol_learns_values_of_any_scale_without_a_jump():
  """Catches steps of the protocol in another order, seen as value errors that grow: a head over
  one constant feature learns the mean of returns around 5000 with a deviation of 300."""
  rng = np.random.default_rng(0)
  returns, errors = init_moments(), []
  kernel, bias = jnp.zeros((1, 1)), jnp.zeros(1)
  valid = np.ones((8, 16), bool)

  def loss(head, targets, old, new):
    values = jnp.full(targets.shape, head[0][0, 0] + head[1][0])
    error = renormalize(values, old, new) - normalize(new, targets, clip=jnp.inf)
    return jnp.mean(jnp.square(error)) / 2

  step = jax.jit(jax.grad(loss))
  for _ in range(100):
    targets = (5000 + 300 * rng.normal(size=(8, 16))).astype(np.float32)
    new = update(returns, targets, valid)
    grads = step((kernel, bias), targets, returns, new)
    kernel, bias = kernel - 0.1 * grads[0], bias - 0.1 * grads[1]
    kernel, bias = preserve_outputs(kernel, bias, returns, new)
    returns = new
    errors.append(abs(float(denormalize(returns, kernel[0, 0] + bias[0])) - 5000))
  assert errors[-1] < 30 and max(errors[50:]) < 60
