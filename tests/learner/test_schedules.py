"""Schedules in frames and the KL-adaptive rate: their values, limits, and that they resume."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfjax.learner.optimizer import descend, make_optimizer
from sfjax.learner.schedules import SCHEDULES, adapt_to_kl, adapted_rate

TOTAL = 10_000_000_000  # More frames than an int32 holds.
LIMITS = {'min_rate': 1e-6, 'max_rate': 1e-2}


@pytest.mark.parametrize(
  ('name', 'quarter', 'middle', 'last'),
  (
    ('constant', 8.0, 8.0, 8.0),
    # 8 - 6 / 4; 8 - 6 / 2.
    ('linear', 6.5, 5.0, 2.0),
    # 2 + 6 (1 + cos(π / 4)) / 2; 2 + 6 / 2.
    ('cosine', 5.0 + 3.0 * math.sqrt(0.5), 5.0, 2.0),
  ),
)
def test_rates_at_the_marks(name, quarter, middle, last):
  """Catches a ramp in updates or in samples, one that goes on or starts again beyond the end, and
  a frame count that overflows."""
  rate = functools.partial(SCHEDULES[name], total_frames=TOTAL, start=8.0, end=2.0)
  assert rate(0) == 8.0
  assert rate(TOTAL // 4) == pytest.approx(quarter)
  assert rate(TOTAL // 2) == pytest.approx(middle)
  assert rate(TOTAL) == rate(TOTAL + 1) == rate(3 * TOTAL) == last
  assert rate(-5) == 8.0
  assert all(type(rate(np.int64(frames))) is float for frames in (0, 7, TOTAL))


@given(
  name=st.sampled_from(sorted(SCHEDULES)),
  frames=st.tuples(*[st.integers(0, 2 * TOTAL)] * 2),
  ends=st.tuples(*[st.floats(0, 1)] * 2),
)
def test_rates_move_one_way_between_their_ends(name, frames, ends):
  """Catches a rate outside of its range: one below 0 would climb."""
  rate = functools.partial(SCHEDULES[name], total_frames=TOTAL, start=max(ends), end=min(ends))
  early, late = rate(min(frames)), rate(max(frames))
  slack = 1e-12
  assert min(ends) - slack <= late <= early + slack <= max(ends) + 2 * slack


def adapt(factor: float, kl: float, base=1e-4, **changes: float) -> float:
  options = {**LIMITS, 'threshold': 0.01, **changes}
  return float(adapt_to_kl(jnp.float32(factor), jnp.float32(kl), base_rate=base, **options))


def test_the_rate_follows_the_kl_outside_of_the_dead_zone():
  """Catches up for down, a factor that is not 1.5, and a zone of another width."""
  assert adapt(1.0, 0.0201) == pytest.approx(1 / 1.5)
  assert adapt(1.0, 0.0049) == pytest.approx(1.5)
  assert adapt(1.0, 0.0) == pytest.approx(1.5)
  for kl in (0.0051, 0.01, 0.0199):
    assert adapt(0.7, kl) == np.float32(0.7)


@pytest.mark.parametrize('kl', (np.nan, np.inf, -np.inf))
def test_a_kl_that_is_not_finite_changes_nothing(kl):
  """Catches a rate that falls, or rises, with every update that is refused."""
  assert adapt(0.7, kl) == np.float32(0.7)


def test_the_rate_stays_within_its_limits_and_comes_back_at_once():
  """Catches limits on the factor, and a factor that runs away where the rate cannot follow."""
  for kl, limit, back in ((1.0, 1e-6, 1.5e-6), (0.0, 1e-2, 1e-2 / 1.5)):
    factor = 1.0
    for _ in range(40):
      factor = adapt(factor, kl)
      assert 1e-6 * 0.999 <= 1e-4 * factor <= 1e-2 * 1.001
    assert 1e-4 * factor == pytest.approx(limit)
    factor = adapt(factor, 0.0 if kl else 1.0)
    assert 1e-4 * factor == pytest.approx(back)


def test_a_base_rate_that_was_changed_takes_effect():
  """Catches a state that holds the rate itself, so that a rate changed on resume is ignored."""
  factor = jnp.float32(adapt(1.0, 1.0, base=1e-3))
  rates = [float(adapted_rate(factor, base_rate=base, **LIMITS)) for base in (1e-3, 1e-4, 9.0, 0.0)]
  assert rates == pytest.approx([1e-3 / 1.5, 1e-4 / 1.5, 1e-2, 1e-6])


@settings(max_examples=30, deadline=None)
@given(
  base=st.floats(1e-6, 1e-2), kls=st.lists(st.floats(0, 0.125, width=32), min_size=1, max_size=20)
)
def test_the_rate_is_that_of_the_rule_on_rates(base, kls):
  """Catches limits that are applied to something else than the rate."""
  factor, rate = jnp.float32(1.0), base
  for kl in kls:
    factor = adapt_to_kl(factor, jnp.float32(kl), base_rate=base, threshold=0.02, **LIMITS)
    if kl > 0.04:
      rate = max(rate / 1.5, 1e-6)
    elif kl < np.float32(0.01):
      rate = min(rate * 1.5, 1e-2)
    assert float(adapted_rate(factor, base_rate=base, **LIMITS)) == pytest.approx(rate, rel=1e-4)


class State(NamedTuple):
  params: Any
  opt_state: Any
  factor: jax.Array


def test_a_resumed_run_is_the_same_run_bit_for_bit():
  """Catches a counter or factor outside of what is saved: frames and the state are all there is."""
  optimizer = make_optimizer('adamw', weight_decay=0.01)

  @jax.jit
  def update(state: State, grads: Any, kl: jax.Array, base_rate: float) -> State:
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    rate = adapted_rate(state.factor, base_rate=base_rate, **LIMITS)
    factor = adapt_to_kl(state.factor, kl, base_rate=base_rate, threshold=0.01, **LIMITS)
    return State(descend(state.params, updates, rate), opt_state, factor)

  def run(state: State, first: int, last: int) -> State:
    for i in range(first, last):
      rng = np.random.default_rng(i)
      grads = {'kernel': rng.normal(size=(3, 2)), 'bias': rng.normal(size=2)}
      base_rate = SCHEDULES['cosine'](4 * 1024 * i, 4 * 1024 * 20, start=1e-3, end=1e-5)
      kl = rng.uniform(0, 0.04)
      state = update(state, jax.tree.map(jnp.float32, grads), jnp.float32(kl), base_rate)
    return state

  params = {'kernel': jnp.ones((3, 2)), 'bias': jnp.ones(2)}
  start = State(params, optimizer.init(params), jnp.float32(1.0))
  straight = run(start, 0, 25)
  saved = jax.tree.map(lambda leaf: np.array(leaf), run(start, 0, 11))
  resumed = run(jax.tree.map(jnp.asarray, saved), 11, 25)
  for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert float(straight.factor) != 1.0
