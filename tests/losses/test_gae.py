"""GAE against the paper's sum, rlax and hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_oracles import Trajectory, gae_sum, random_trajectory

from sfjax.losses import gae, vtrace

GAMMA = 0.9
jit_gae = jax.jit(gae)  # λ is traced: a Python branch on it would fail here.


def run(x: Trajectory, lambda_: float = 0.8):
  return jit_gae(*x.args(GAMMA), lambda_=lambda_)


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**32 - 1), steps=st.sampled_from((1, 2, 7)), lambda_=st.floats(0.0, 1.0)
)
def test_a_wrong_recursion_or_end_differs_from_the_papers_sum(seed, steps, lambda_):
  """Catches λ or γ left out of the trace and a trace through an end."""
  x = random_trajectory(seed, steps)
  targets, advantages = gae_sum(x, GAMMA, lambda_)
  out = run(x, lambda_)
  np.testing.assert_allclose(out.targets, targets, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(out.advantages, advantages, rtol=1e-4, atol=1e-4)


def test_a_misread_paper_differs_from_rlax():
  """Second opinion where no episode is cut; terminations are discounts of 0 on both sides."""
  x = random_trajectory(3, 7)._replace(cut=np.zeros(7, bool))
  values = np.append(x.v_tm1, x.v_t[-1])
  x = x._replace(v_t=values[1:])
  _, _, r_t, discount_t, _ = map(jnp.asarray, x.args(GAMMA))
  theirs = rlax.truncated_generalized_advantage_estimation(
    r_t, discount_t, 0.8, jnp.asarray(values)
  )
  np.testing.assert_allclose(run(x).advantages, theirs, rtol=1e-5, atol=1e-5)


def test_lambda_at_the_wrong_place_breaks_its_two_ends():
  """Catches λ on the TD error: λ = 0 is the one-step error, λ = 1 is on-policy V-trace."""
  x = random_trajectory(4, 7)
  v_tm1, v_t, r_t, discount_t, _ = x.args(GAMMA)
  np.testing.assert_allclose(
    run(x, 0.0).advantages, r_t + discount_t * v_t - v_tm1, rtol=1e-5, atol=1e-6
  )
  on_policy = vtrace(*map(jnp.asarray, (*x.args(GAMMA), np.ones(7, np.float32))))
  for ours, other in zip(run(x, 1.0), on_policy, strict=True):
    np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-6)


def test_a_truncation_taken_for_a_termination_loses_the_final_value():
  """Catches discount 0 at a cut, and bootstrapping from the next episode's first value."""
  # Step 0 is cut: 1 + 1/2 · 10 - 3 = 3. Step 1 terminates: 1 - 100 = -99.
  out = gae(
    jnp.array([3.0, 100.0]),
    jnp.array([10.0, 100.0]),
    jnp.ones(2),
    jnp.array([0.5, 0.0]),
    jnp.array([True, True]),
  )
  np.testing.assert_allclose(out.advantages, [3.0, -99.0])
  np.testing.assert_allclose(out.targets, [6.0, 1.0])


@pytest.mark.parametrize('cut', [1, 3, 6])
def test_a_trace_that_leaks_over_a_cut_differs_from_the_split_trajectory(cut):
  """Catches a missing `done` in the trace."""
  x = random_trajectory(5, 7, ends=False)
  x.cut[cut - 1] = True
  parts = [run(Trajectory(*(a[half] for a in x))) for half in (slice(cut), slice(cut, None))]
  joined = np.concatenate([part.advantages for part in parts])
  np.testing.assert_allclose(run(x).advantages, joined, rtol=1e-5, atol=1e-6)


def test_the_last_steps_error_is_not_zeroed():
  """Catches a bootstrap that cancels the last step's TD error."""
  x = random_trajectory(7, 4, ends=False)
  more = x._replace(r_t=x.r_t + np.array([0, 0, 0, 1], np.float32))
  moved = run(more).advantages - run(x).advantages
  # One to one at the last step, and γλ = 0.72 of it at the step before.
  np.testing.assert_allclose(moved[-2:], [0.72, 1.0], rtol=1e-5)


@pytest.mark.parametrize('shape', [(3,), (3, 2)])
def test_an_axis_taken_for_time_differs_from_column_by_column(shape):
  """Catches a reduction or a scan over the wrong axis for [T, B] and [T, B, 2]."""
  columns = [random_trajectory(seed, 4) for seed in range(int(np.prod(shape)))]
  inputs = zip(*(x.args(GAMMA) for x in columns), strict=True)
  stacked = [jnp.asarray(np.stack(column, -1).reshape(4, *shape)) for column in inputs]
  out = jit_gae(*stacked, lambda_=0.8)
  each = np.stack([run(x).advantages for x in columns], -1).reshape(4, *shape)
  np.testing.assert_allclose(out.advantages, each, rtol=1e-5, atol=1e-6)


def test_targets_that_learn_have_a_gradient():
  """Catches a missing stop_gradient on either output."""
  x = random_trajectory(11, 4)

  def total(v_tm1, v_t):
    _, _, r_t, discount_t, done_t = map(jnp.asarray, x.args(GAMMA))
    out = gae(v_tm1, v_t, r_t, discount_t, done_t)
    return jnp.sum(out.targets + out.advantages)

  for grad in jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(x.v_tm1), jnp.asarray(x.v_t)):
    np.testing.assert_array_equal(grad, 0.0)


def test_a_missing_axis_is_not_broadcast():
  """Catches [T, 1] against [T]: broadcasting would silently give [T, T]."""
  v_tm1, *rest = map(jnp.asarray, random_trajectory(0, 4).args(GAMMA))
  with pytest.raises(AssertionError):
    gae(v_tm1[:, None], *rest)
