"""Warnings about how learning goes, each with the knob to turn. From update metrics; no jax."""

import math
from collections.abc import Mapping

from sfjax.config import Config, updates_per_batch

MAX_DROPPED_SHARE = 0.05
MAX_LAG_BATCHES = 10.0  # Lag counts updates; of some epochs and minibatches a batch makes many.
MAX_CLIPPED_SHARE = 0.3
MIN_EFFECTIVE_SHARE = 0.5


def advice(metrics: Mapping[str, float | None], config: Config) -> list[str]:
  """Says what is out of hand and which option to change.

  Args:
    metrics: means of update metrics over an interval, by name; one that is missing, None or NaN
      is not judged.
    config: of the run.

  Returns:
    A line for each problem, none if learning is healthy. The caller decides how often to tell.
  """

  def read(name: str) -> float:
    value = metrics.get(name)
    return math.nan if value is None else value

  lines = []
  learner, per_batch = config.learner, updates_per_batch(config)
  dropped, lag = read('dropped_share'), read('lag_updates_p90')
  old = dropped > MAX_DROPPED_SHARE or lag > MAX_LAG_BATCHES * per_batch
  if dropped > MAX_DROPPED_SHARE:
    lines.append(
      f'{dropped:.0%} of samples are dropped, older than learner.max_policy_lag '
      f'{learner.max_policy_lag}: {_catch_up(config)}; or allow more lag'
    )
  elif old:
    lines.append(
      f'a tenth of samples are {lag:.0f} updates old or older, {lag / per_batch:.0f} batches: '
      f'{_catch_up(config)}'
    )
  clipped = read('clipped_share')
  if config.loss.use_clip and clipped > MAX_CLIPPED_SHARE:
    cause = 'see to the lag first, or lower' if old else 'lower'
    fewer = f', use fewer than {learner.epochs} learner.epochs' if learner.epochs > 1 else ''
    limit = ', or set learner.max_kl' if learner.epochs > 1 and learner.max_kl is None else ''
    lines.append(
      f'{clipped:.0%} of ratios are outside their range and teach the policy little: {cause} '
      f'learner.learning_rate {learner.learning_rate:g}{fewer}{limit}'
    )
  effective = read('effective_sample_share')
  if effective < MIN_EFFECTIVE_SHARE:
    lines.append(
      f'few samples outweigh the others, which tell as much as {effective:.0%} of them would: the '
      f'policy has moved far since they were acted; {_catch_up(config)}'
    )
  return lines


def _catch_up(config: Config) -> str:
  """The options that shorten the way from acting to learning."""
  learner, sampler = config.learner, config.sampler
  options = [
    f'use fewer environments (sampler.envs_per_worker {sampler.envs_per_worker})',
    f'a larger learner.batch_size ({learner.batch_size})',
  ]
  if learner.epochs > 1:
    options.append(f'fewer learner.epochs ({learner.epochs})')
  if learner.minibatches > 1:
    options.append(f'fewer learner.minibatches ({learner.minibatches})')
  return ', '.join(options[:-1]) + f' or {options[-1]}'
