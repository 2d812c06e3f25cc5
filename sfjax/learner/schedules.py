"""How the learning rate changes in a run. Schedules count frames, and the KL-adaptive rate is a
factor in the learner's state, so both go on where a checkpoint was made; a base rate changed by the
user or by population training takes effect with the next update."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[..., float]

_FACTOR = 1.5


def constant(frames: int, total_frames: int, *, start: float, end: float) -> float:
  """Returns `start`; takes what the other schedules take."""
  del frames, total_frames, end
  return start


def linear(frames: int, total_frames: int, *, start: float, end: float) -> float:
  """Returns the rate on the straight line from `start` to `end`.

  Args:
    frames: of the policy so far, over all resumes.
    total_frames: at which the rate is `end`, where it stays.
    start: rate at frame 0.
    end: rate at the last frame.
  """
  done = _fraction(frames, total_frames)
  return (1.0 - done) * start + done * end


def cosine(frames: int, total_frames: int, *, start: float, end: float) -> float:
  """Returns the rate on half a cosine from `start` to `end`; see `linear` for the arguments.

  Eq. 5 of "SGDR: Stochastic Gradient Descent with Warm Restarts" (Loshchilov & Hutter 2016,
  arXiv:1608.03983), without a restart.
  """
  done = 0.5 * (1.0 - math.cos(math.pi * _fraction(frames, total_frames)))
  return (1.0 - done) * start + done * end


# The base rate of 'kl_adaptive' is constant; the learner's state has the factor to it.
SCHEDULES: dict[str, Schedule] = {
  'constant': constant,
  'linear': linear,
  'cosine': cosine,
  'kl_adaptive': constant,
}


def adapted_rate(
  factor: jax.Array,
  *,
  base_rate: float | jax.Array,
  min_rate: float | jax.Array,
  max_rate: float | jax.Array,
) -> jax.Array:
  """Returns the rate to use: the base rate times the KL-adaptive factor, within its limits."""
  return jnp.clip(base_rate * factor, min_rate, max_rate)


def adapt_to_kl(
  factor: jax.Array,
  kl: jax.Array,
  *,
  base_rate: float | jax.Array,
  threshold: float | jax.Array,
  min_rate: float | jax.Array,
  max_rate: float | jax.Array,
) -> jax.Array:
  """Changes the KL-adaptive factor after an update, or after an epoch.

  A KL above twice the threshold makes the rate 1.5 times smaller, one below half of it 1.5 times
  larger, any other leaves it. "Proximal Policy Optimization" (Schulman et al. 2017,
  arXiv:1707.06347, section 4) adapts a penalty in this way.

  Args:
    factor: [] float32, 1 at first. What lies beyond the limits of the rate is forgotten.
    kl: [] mean KL of policies in nats; one that is not finite changes nothing.
    base_rate: what the factor multiplies.
    threshold: the KL aimed at, in nats.
    min_rate: smallest rate.
    max_rate: largest rate.

  Returns:
    The new factor; bit for bit the old one where the KL is in between or not finite.
  """
  up, down = kl < 0.5 * threshold, kl > 2.0 * threshold
  step = jnp.where(down, 1.0 / _FACTOR, _FACTOR)
  rate = adapted_rate(factor, base_rate=base_rate, min_rate=min_rate, max_rate=max_rate)
  new = jnp.clip(rate * step, min_rate, max_rate) / base_rate
  return jnp.where((up | down) & jnp.isfinite(kl), new, factor)


def _fraction(frames: int, total_frames: int) -> float:
  return min(max(float(frames) / float(total_frames), 0.0), 1.0)
