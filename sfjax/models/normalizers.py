"""Running mean and deviation of observations and of returns, and what they are used for.

The statistics belong to the parameters that the inference server receives: the learner updates
them from valid samples, acting and evaluation only read them. A batch is read under the
statistics it was acted with, and updates them for the version after it, so the ratio of an update
at lag 0 is 1.

With normalised returns the value head's output is in units of the running deviation, and the
network returns it in raw units: acting stores raw values, whatever version reads them.

1. The learner computes V-trace or GAE in raw units.
2. The value loss, its clip too, and advantages are divided by the running deviation. Returns are
   not clipped: a rare one is many deviations large, and the critic has to be able to say so.
3. `update_moments` takes in the targets, once for every sample, not in each epoch.
4. After the optimizer's step `preserve_outputs` changes the value head as the units changed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfjax.losses.masked import psum

CLIP = 5.0
HORIZON = 1e7  # Samples; float32 counts exactly up to 1.6e7.

_EPS = 1e-5  # Added to a variance: what never moved stays at 0 without a division by 0.
_CLIP_AFTER = 1000  # Samples from which on the running deviation tells what is huge.
_CLIP_DEVIATIONS = 100.0
_LARGEST = 1e15  # Its square, times any number of samples, is finite in float32.


class Moments(NamedTuple):
  """Running statistics; float32, of any shape but the count."""

  count: jax.Array  # [] samples, the horizon at most.
  mean: jax.Array
  mean_low: jax.Array  # What the mean's rounding left over: the mean is the sum of both.
  var: jax.Array


def moments_shape(obs_shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of the statistics of an observation: of an image, one number a channel.

  Differs from Sample Factory, which has one for each pixel and channel. Those of channels are good
  after one batch, leave alone what never moves, cost no memory, and go into the weights of the
  first convolution, so that pixels stay bytes.
  """
  return obs_shape[-1:]


def init_moments(shape: tuple[int, ...] = ()) -> Moments:
  """Returns the statistics before the first sample: `normalize` then only clips."""
  return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.zeros(shape), jnp.ones(shape))


def update_moments(
  moments: Moments,
  batch: jax.Array,
  valid: jax.Array,
  *,
  axis_name: str | None = None,
  horizon: float = HORIZON,
) -> Moments:
  """Updates statistics with the valid samples of a batch, on all devices at once.

  Merges exactly, by "Algorithms for Computing the Sample Variance" (Chan, Golub & LeVeque 1983):
  however samples are cut into batches or divided among devices, the result is that of all. Up to
  `horizon` samples every one weighs the same. From then on old ones are forgotten, as policy and
  returns change, and the weight of a batch can never become too small for float32.

  A sample with a number that is not finite does not count. After 1,000 samples a number counts as
  at most 100 running deviations from the running mean; what really is on a larger scale is
  followed all the same, the deviation growing by up to that factor with a batch.

  Args:
    moments: equal on all devices.
    batch: [*valid, ..., *moments.mean] numbers, or bytes; axes between are pooled.
    valid: bool [T, ...] which samples count. What others hold does not matter.
    axis_name: pmap axis whose devices share the batch; None for one device.
    horizon: samples after which a new one replaces an old one; 1.6e7 at most.

  Returns:
    New statistics; `moments` bit for bit where no sample counts.
  """
  batch, moments = jax.lax.stop_gradient((batch, moments))
  bytes_ = batch.dtype == jnp.uint8
  if not bytes_:
    batch = batch.astype(jnp.float32)
  shape = moments.mean.shape
  if not bytes_:
    valid = valid & jnp.all(jnp.isfinite(batch), axis=tuple(range(valid.ndim, batch.ndim)))
  count = psum(jnp.sum(valid, dtype=jnp.float32), axis_name)
  pooled = batch[0].size // (valid[0].size * moments.mean.size)

  center, center_low = moments.mean, moments.mean_low
  if not bytes_:  # Bytes are close enough to 0 for their variance not to cancel.
    total = _sum_to(_select(valid, jnp.clip(batch, -_LARGEST, _LARGEST)), shape)
    guess = psum(total, axis_name) / (jnp.maximum(count, 1.0) * pooled)
    center = jnp.where(moments.count > 0, center, guess)
  trusted = moments.count >= _CLIP_AFTER
  limit = jnp.where(trusted, _CLIP_DEVIATIONS * deviation(moments), _LARGEST)

  def of_step(step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, valid = step
    errors = x - _expand(center, x.ndim) - _expand(center_low, x.ndim)
    errors = jnp.clip(errors, *(_expand(sign * limit, x.ndim) for sign in (-1, 1)))
    count = jnp.sum(valid, dtype=jnp.float32) * pooled
    mean = _sum_to(_select(valid, errors), shape) / jnp.maximum(count, 1.0)
    squares = jnp.square(errors - _expand(mean, x.ndim))
    return count, mean, _sum_to(_select(valid, squares), shape)

  # On the CPU all at once would make float copies of all images; elsewhere a loop is slow.
  loop = pooled > 1 and jax.default_backend() == 'cpu'
  counts, means, squares = (jax.lax.map if loop else _vmap)(of_step, (batch, valid))
  weights = counts.reshape(-1, *[1] * len(shape)) / (jnp.maximum(count, 1.0) * pooled)
  mean = psum(jnp.sum(weights * means, axis=0), axis_name)
  between = jnp.sum(weights * jnp.square(means - mean[None]), axis=0)
  within_steps = jnp.sum(squares, axis=0) / (jnp.maximum(count, 1.0) * pooled)
  var = psum(between + within_steps, axis_name)

  weight = count / jnp.maximum(moments.count + count, 1.0)
  high, low = _two_sum(center, weight * mean)
  high, low = _two_sum(high, low + center_low)
  new = Moments(
    jnp.minimum(moments.count + count, horizon),
    high,
    low,
    (1.0 - weight) * moments.var + weight * (var + (1.0 - weight) * jnp.square(mean)),
  )
  return jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), new, moments)


def deviation(moments: Moments) -> jax.Array:
  """The running standard deviation, never 0."""
  return jnp.sqrt(moments.var + _EPS)


def normalize(moments: Moments, x: jax.Array, *, clip: float = CLIP) -> jax.Array:
  """Brings numbers [..., *moments.mean] to mean 0 and deviation 1, within ±`clip`.

  What is not a number stays so: the update that reads it is refused.
  """
  mean, low, scale = (
    _expand(y, x.ndim) for y in (moments.mean, moments.mean_low, deviation(moments))
  )
  return jnp.clip((x - mean - low) / scale, -clip, clip)


def denormalize(moments: Moments, x: jax.Array) -> jax.Array:
  """Returns normalised numbers [..., *moments.mean] to raw units; the inverse of `normalize`."""
  mean, low, scale = (
    _expand(y, x.ndim) for y in (moments.mean, moments.mean_low, deviation(moments))
  )
  return mean + (low + x * scale)


def renormalize(x: jax.Array, old: Moments, new: Moments) -> jax.Array:
  """Returns numbers [..., *moments.mean] normalised by `old` as `new` would normalise them.

  Nothing is clipped. Where the statistics are equal, x comes back bit for bit.
  """
  scale = deviation(old) / deviation(new)
  shift = (old.mean - new.mean + (old.mean_low - new.mean_low)) / deviation(new)
  return x * _expand(scale, x.ndim) + _expand(shift, x.ndim)


def preserve_outputs(
  kernel: jax.Array, bias: jax.Array, old: Moments, new: Moments
) -> tuple[jax.Array, jax.Array]:
  """Changes the value head so that its denormalised values stay as they were.

  Section 2.1 of "Learning values across many orders of magnitude" (van Hasselt et al. 2016,
  arXiv:1602.07714), Pop-Art. Differs from the paper: the optimizer's step comes before, under the
  old head, for a loss in the new units.

  Args:
    kernel: [H, 1] of the value head.
    bias: [1].
    old: statistics of returns, of shape (), that the head's output has been normalised by.
    new: those that it is to be normalised by.
  """
  scale = deviation(old) / deviation(new)
  return kernel * scale, renormalize(bias, old, new)


def fold_into_convolution(
  moments: Moments,
  kernel: jax.Array,
  bias: jax.Array,
  *,
  clip: float = CLIP,
  dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
  """Changes the first convolution so that it reads bytes as if they had been normalised.

  Where `normalize` clips, this divides by more: no byte is read as more than ±`clip`. Padding is
  read as the byte 0.

  Args:
    moments: statistics of bytes, one number a channel.
    kernel: [k, k, C, F] weights for normalised pixels.
    bias: [F].
    clip: largest number that a byte is read as.
    dtype: of the returned weights; the bias subtracts the mean as those weights add it.

  Returns:
    Weights [k, k, C, F] and bias [F] (float32) for bytes.
  """
  mean = moments.mean + moments.mean_low
  scale = jnp.maximum(deviation(moments), jnp.maximum(mean, 255.0 - mean) / clip)
  kernel = (kernel / scale[None, None, :, None]).astype(dtype)
  of_mean = kernel.astype(jnp.float32) * mean[None, None, :, None]
  return kernel, bias - jnp.sum(of_mean, axis=(0, 1, 2))


def _vmap(f: Any, arrays: Any) -> Any:
  return jax.vmap(f)(arrays)


def _expand(x: jax.Array, ndim: int) -> jax.Array:
  return x.reshape(*[1] * (ndim - x.ndim), *x.shape)


def _select(valid: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - valid.ndim)), x, 0.0)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return jnp.sum(x, axis=tuple(range(x.ndim - len(shape))), dtype=jnp.float32)


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns a + b and what its rounding lost ("The Art of Computer Programming", 4.2.2)."""
  total = a + b
  part = total - a
  return total, (a - (total - part)) + (b - part)
