"""V-trace against the paper's sum, rlax and hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_oracles import Trajectory, gae_sum, random_trajectory, vtrace_sum

from sfjax.losses import vtrace

GAMMA = 0.9
jit_vtrace = jax.jit(vtrace)  # The caps are traced: a Python branch on one would fail here.


def run(x: Trajectory, *, rho_bar: float = 1.0, c_bar: float = 1.0, lambda_: float = 1.0):
  return jit_vtrace(*x.args(GAMMA), x.ratio, rho_bar=rho_bar, c_bar=c_bar, lambda_=lambda_)


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**32 - 1),
  steps=st.sampled_from((1, 2, 7)),
  rho_bar=st.floats(0.3, 3.0),
  c_bar=st.floats(0.3, 3.0),
  lambda_=st.floats(0.0, 1.0),
)
def test_a_wrong_recursion_cap_or_end_differs_from_the_papers_sum(
  seed, steps, rho_bar, c_bar, lambda_
):
  """Catches swapped caps, a trace through an end, a shifted c, a wrong next target, and λ on the
  TD error, inside the cap of c, or missing from the trace or the advantage."""
  x = random_trajectory(seed, steps)
  out = run(x, rho_bar=rho_bar, c_bar=c_bar, lambda_=lambda_)
  targets, advantages = vtrace_sum(x, GAMMA, rho_bar, c_bar, lambda_)
  np.testing.assert_allclose(out.targets, targets, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(out.advantages, advantages, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('lambda_', [1.0, 0.6])
def test_a_misread_paper_differs_from_rlax(lambda_):
  """Second opinion where no episode is cut (at a cut rlax reads the next episode's value)."""
  x = random_trajectory(3, 7)._replace(cut=np.zeros(7, bool))
  v_t = np.where(x.terminated, x.v_t, np.append(x.v_tm1[1:], x.v_t[-1]))
  x = x._replace(v_t=v_t)
  out = run(x, rho_bar=1.5, lambda_=lambda_)
  v_tm1, v_t, r_t, discount_t, _ = x.args(GAMMA)
  theirs = rlax.vtrace_td_error_and_advantage(
    *map(jnp.asarray, (v_tm1, v_t, r_t, discount_t, x.ratio)),
    lambda_=lambda_,
    clip_rho_threshold=1.5,
  )
  np.testing.assert_allclose(out.targets, theirs.errors + v_tm1, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    out.advantages * np.minimum(1.0, x.ratio), theirs.pg_advantage, rtol=1e-5, atol=1e-5
  )


def test_lambda_is_one_unless_given():
  """Catches a λ that changes today's numbers, in any bit."""
  x = random_trajectory(13, 7)
  without = jit_vtrace(*x.args(GAMMA), x.ratio, rho_bar=1.0, c_bar=1.0)
  for ours, other in zip(run(x, lambda_=1.0), without, strict=True):
    np.testing.assert_array_equal(ours, other)


def test_on_policy_lambda_is_that_of_gae():
  """Catches λ in the targets alone: advantages would look a step too far ahead."""
  x = random_trajectory(4, 7)._replace(ratio=np.ones(7, np.float32))
  targets, advantages = gae_sum(x, GAMMA, 0.7)
  out = run(x, lambda_=0.7)
  np.testing.assert_allclose(out.targets, targets, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(out.advantages, advantages, rtol=1e-4, atol=1e-5)


def test_hand_worked_numbers():
  """Catches ρ left out of the TD error, or applied to the advantage (the actor's business)."""
  # γ = 1/2, ρ = min(1, (2, 1/2)) = (1, 1/2), c = (1, 1/2).
  # δ1 = 1/2 (0 + 1/2 · 8 - 2) = 1             v_1 = 2 + 1 = 3
  # δ0 = 1 (0 + 1/2 · 2 - 1) = 0               v_0 = 1 + 0 + γ c_0 · 1 = 1.5
  # advantages: 0 + 1/2 · v_1 - 1 = 0.5        and 0 + 1/2 · 8 - 2 = 2
  out = vtrace(
    jnp.array([1.0, 2.0]),
    jnp.array([2.0, 8.0]),
    jnp.zeros(2),
    jnp.full(2, 0.5),
    jnp.array([False, False]),
    jnp.array([2.0, 0.5]),
  )
  np.testing.assert_allclose(out.targets, [1.5, 3.0])
  np.testing.assert_allclose(out.advantages, [0.5, 2.0])


def test_a_truncation_taken_for_a_termination_loses_the_final_value():
  """Catches discount 0 at a cut, and bootstrapping from the next episode's first value."""
  # One episode is cut after step 0: v_0 = 1 + 1/2 · 10 = 6, and nothing of step 1 (value 100)
  # may appear. Step 1 terminates: v_1 = 1, whatever follows it.
  out = vtrace(
    jnp.array([3.0, 100.0]),
    jnp.array([10.0, 100.0]),
    jnp.ones(2),
    jnp.array([0.5, 0.0]),
    jnp.array([True, True]),
    jnp.ones(2),
  )
  np.testing.assert_allclose(out.targets, [6.0, 1.0])
  np.testing.assert_allclose(out.advantages, [3.0, -99.0])


@pytest.mark.parametrize('cut', [1, 3, 6])
def test_a_trace_that_leaks_over_a_cut_differs_from_the_split_trajectory(cut):
  """Catches a missing `done` in the trace or in the next target."""
  x = random_trajectory(5, 7, ends=False)
  x.cut[cut - 1] = True
  whole = run(x)
  parts = [run(Trajectory(*(a[half] for a in x))) for half in (slice(cut), slice(cut, None))]
  for name in whole._fields:
    joined = np.concatenate([getattr(part, name) for part in parts])
    np.testing.assert_allclose(getattr(whole, name), joined, rtol=1e-5, atol=1e-6)


def test_the_last_steps_error_is_not_zeroed():
  """Catches Sample Factory's next value (V - r) / γ, which makes the last TD error zero."""
  x = random_trajectory(7, 4, ends=False)
  more = x._replace(r_t=x.r_t + np.array([0, 0, 0, 1], np.float32))
  moved = run(more).advantages - run(x).advantages
  np.testing.assert_allclose(moved[-1], 1.0, rtol=1e-5)


@pytest.mark.parametrize('shape', [(), (3,), (3, 2)])
def test_an_axis_taken_for_time_differs_from_column_by_column(shape):
  """Catches a reduction or a scan over the wrong axis for [T], [T, B] and [T, B, 2]."""
  columns = [random_trajectory(seed, 4) for seed in range(int(np.prod(shape)))]
  inputs = [(*x.args(GAMMA), x.ratio) for x in columns]
  stacked = [np.stack(column, -1).reshape(4, *shape) for column in zip(*inputs, strict=True)]
  out = jit_vtrace(*stacked)
  expected = [run(x) for x in columns]
  for name in out._fields:
    each = np.stack([getattr(column, name) for column in expected], -1).reshape(4, *shape)
    np.testing.assert_allclose(getattr(out, name), each, rtol=1e-5, atol=1e-6)
  if shape == (3,):
    mapped = jax.vmap(vtrace, in_axes=1, out_axes=1)(*map(jnp.asarray, stacked))
    np.testing.assert_allclose(mapped.targets, out.targets, rtol=1e-6, atol=1e-6)


def test_targets_that_learn_have_a_gradient():
  """Catches a missing stop_gradient on either output."""
  x = random_trajectory(11, 4)

  def total(v_tm1, v_t, rho):
    _, _, r_t, discount_t, done_t = map(jnp.asarray, x.args(GAMMA))
    out = vtrace(v_tm1, v_t, r_t, discount_t, done_t, rho)
    return jnp.sum(out.targets + out.advantages)

  grads = jax.jit(jax.grad(total, (0, 1, 2)))(*map(jnp.asarray, (x.v_tm1, x.v_t, x.ratio)))
  for grad in grads:
    np.testing.assert_array_equal(grad, 0.0)


def test_a_missing_axis_is_not_broadcast():
  """Catches [T, 1] against [T]: broadcasting would silently give [T, T]."""
  x = random_trajectory(0, 4)
  with pytest.raises(AssertionError):
    vtrace(*map(jnp.asarray, (*x.args(GAMMA), x.ratio[:, None])))
