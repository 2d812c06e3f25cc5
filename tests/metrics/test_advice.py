"""Warnings with the knob to turn: when they come, when they stay away, and what they name."""

import math
import re

import pytest

from sfjax.config import Config
from sfjax.fields import field_types
from sfjax.metrics.advice import advice

HEALTHY = {
  'dropped_share': 0.01,
  'lag_updates_p90': 9.0,
  'clipped_share': 0.1,
  'effective_sample_share': 0.9,
}


def config_of(**learner: float) -> Config:
  config = Config()
  for name, value in learner.items():
    setattr(config.learner, name, value)
  return config


def test_healthy_or_unknown_numbers_are_not_warned_of():
  """Catches a comparison that is true of NaN, and a metric that must be there."""
  assert advice(HEALTHY, Config()) == []
  assert advice({}, Config()) == []
  assert advice(dict.fromkeys(HEALTHY), Config()) == []
  assert advice(dict.fromkeys(HEALTHY, math.nan), Config()) == []


@pytest.mark.parametrize(
  ('name', 'value', 'said'),
  (
    (
      'dropped_share',
      0.2,
      '20% of samples are dropped, older than learner.max_policy_lag 100: use',
    ),
    ('lag_updates_p90', 60.0, 'a tenth of samples are 60 updates old or older, 60 batches: use'),
    ('clipped_share', 0.4, '40% of ratios .*: lower learner.learning_rate 0.0001$'),
    ('effective_sample_share', 0.3, 'as much as 30% of them'),
  ),
)
def test_each_problem_is_told_with_its_number_and_an_option(name, value, said):
  """Catches a threshold on the wrong side, and a warning that says nothing to do."""
  (line,) = advice(HEALTHY | {name: value}, Config())
  assert re.search(said, line), line
  options = [path for path in field_types(Config) if path in line]
  assert options


def test_lag_is_judged_in_batches():
  """Catches many updates a batch taken for slowness: 60 of them are 5 batches here."""
  metrics = HEALTHY | {'lag_updates_p90': 60.0}
  assert advice(metrics, config_of(epochs=3, minibatches=4)) == []
  (line,) = advice(metrics, config_of(epochs=2))
  assert 'fewer learner.epochs (2)' in line and 'learner.minibatches' not in line


def test_without_a_clip_nothing_is_clipped():
  """Catches advice about a range that the plain policy gradient does not have."""
  config = Config()
  config.loss.use_clip = False
  assert advice(HEALTHY | {'clipped_share': 0.9}, config) == []


def test_clipping_by_old_samples_is_not_blamed_on_the_step_alone():
  """Catches advice to learn slower where sampling is too far ahead, and to set what is set."""
  metrics = HEALTHY | {'clipped_share': 0.5, 'dropped_share': 0.3, 'lag_updates_p90': 90.0}
  dropped, clipped = advice(metrics, config_of(epochs=4))
  assert 'dropped' in dropped and 'see to the lag first' in clipped
  assert 'fewer than 4 learner.epochs, or set learner.max_kl' in clipped
  assert 'max_kl' not in advice(metrics, config_of(epochs=4, max_kl=0.1))[1]
