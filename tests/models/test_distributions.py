"""Distributions over actions, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.models import distributions

# Probabilities 1/2, 1/4, 1/8, 1/8, as logits that are not normalised.
PROBABILITIES = np.array([0.5, 0.25, 0.125, 0.125])
LOGITS = jnp.asarray(np.log(PROBABILITIES) + 3.0, jnp.float32)


def test_log_prob_is_that_of_the_action_under_normalised_logits():
  """Catches logits that are taken for log-probabilities, and a wrong element or axis."""
  # log 1/2 = -0.693147, log 1/4 = -1.386294, log 1/8 = -2.079442.
  expected = [-0.693147, -1.386294, -2.079442, -2.079442]
  logits = jnp.broadcast_to(LOGITS, (3, 4, 4))
  actions = jnp.broadcast_to(jnp.arange(4), (3, 4))
  out = distributions.log_prob(logits, actions)
  np.testing.assert_allclose(out, np.broadcast_to(expected, (3, 4)), rtol=1e-5)
  assert float(distributions.log_prob(LOGITS, jnp.int32(1))) == pytest.approx(-1.386294, rel=1e-5)


def test_entropy_by_hand():
  """Catches a wrong sign, bits for nats, and a sum over the wrong axis."""
  # 1/2 · log 2 + 1/4 · log 4 + 2 · 1/8 · log 8 = (1/2 + 1/2 + 3/4) log 2 = 1.75 · 0.693147.
  logits = jnp.stack([LOGITS, jnp.zeros(4)])[None]
  # Uniform: log 4 = 1.386294.
  np.testing.assert_allclose(distributions.entropy(logits), [[1.213008, 1.386294]], rtol=1e-5)


def test_extreme_logits_stay_finite():
  """Catches 0 · log 0, also in the gradient."""
  logits = jnp.array([0.0, -1e4, 200.0])
  assert float(distributions.entropy(logits)) == pytest.approx(0.0, abs=1e-6)
  assert float(distributions.log_prob(logits, jnp.int32(1))) == pytest.approx(-10_200)
  assert np.isfinite(jax.grad(distributions.entropy)(logits)).all()


def test_sampling_frequencies_are_the_probabilities():
  """Catches noise on the wrong scale, or of the wrong kind."""
  n = 40_000
  keys = jax.random.split(jax.random.key(0), n)
  actions = jax.jit(jax.vmap(distributions.sample, in_axes=(0, None)))(keys, LOGITS)
  assert actions.dtype == jnp.int32
  counts = np.bincount(np.asarray(actions), minlength=4)
  # Standard deviation of a frequency: at most sqrt(1/4 / 40,000) = 0.0025; four of them.
  np.testing.assert_allclose(counts / n, PROBABILITIES, atol=0.01)


def test_mode_is_the_likeliest_action():
  """Catches a sampled action, and the argument of the smallest."""
  logits = jnp.stack([LOGITS, -LOGITS, jnp.array([0.0, 1.0, 5.0, 2.0])])[None]
  assert distributions.mode(logits[:, ::2]).tolist() == [[0, 2]]
  assert distributions.mode(logits).dtype == jnp.int32
  assert distributions.mode(logits)[0, 1] >= 2
