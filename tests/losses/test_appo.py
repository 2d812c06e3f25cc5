"""The composed loss: masks, episode ends, neutral slots, exact means over devices."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracles import Trajectory, gae_sum, vtrace_sum

from sfjax.losses import GAEOutput, appo_loss, gae, neutral_transitions, transition_masks
from sfjax.losses.masked import masked_mean

# What the networks computed.
OUTPUTS = ('log_prob_tm1', 'entropy_tm1', 'exploration_tm1', 'kl_tm1', 'values')
FLAGS = ('use_vtrace', 'use_clip', 'normalize_advantages', 'axis_name')
MODES = list(itertools.product((True, False), (True, False)))
SCALARS = {'gamma': 0.9, 'rho_bar': 1.2, 'c_bar': 1.1, 'gae_lambda': 0.8, 'ratio_min': 0.9}
SCALARS |= {'ratio_max': 1.1, 'value_coef': 0.5, 'value_clip': 0.3, 'exploration_coef': 0.01}
SCALARS |= {'vtrace_lambda': 1.0, 'kl_coef': 0.1}
OPTIONAL = ('exploration_tm1', 'kl_tm1', 'lag_tm1')
ALL_ROWS = list(itertools.product(('go', 'terminate', 'truncate'), repeat=4))
traces = []  # One entry for every compilation of `loss_and_grads`.


def lay_out(events):
  """The flags of one row, [T] and [T+1]: the slab's rules for what happens step by step."""
  steps, slot = len(events), 0
  played, terminated = np.zeros((2, steps), bool)
  first = np.zeros(steps + 1, bool)
  for event in events:
    if slot < steps:
      played[slot], terminated[slot] = True, event == 'terminate'
      # After a truncation one slot, unplayed, holds the final observation.
      slot += 2 if event == 'truncate' else 1
      if event != 'go' and slot <= steps:
        first[slot] = True
  return played, terminated, first


def make_batch(rows, seed=0):
  """Random numbers everywhere on the given rows, as [T, B] arrays; every sample valid."""
  played, terminated, first = (np.stack(x, 1) for x in zip(*map(lay_out, rows), strict=True))
  rng = np.random.default_rng(seed)
  log_prob, behaviour_log_prob, behaviour_value, rewards, exploration, kl = rng.normal(
    size=(6, *played.shape)
  ).astype(np.float32)
  return {
    'log_prob_tm1': log_prob - 2,
    'entropy_tm1': rng.random(played.shape).astype(np.float32),
    'exploration_tm1': exploration,
    'kl_tm1': np.abs(kl),
    'lag_tm1': rng.integers(0, 15, played.shape).astype(np.int32),
    'values': rng.normal(size=first.shape).astype(np.float32),
    'behaviour_log_prob': behaviour_log_prob - 2,
    'behaviour_value': behaviour_value,
    'rewards': rewards,
    'terminated': terminated,
    'played': played,
    'valid': played.copy(),
    'first': first,
  }


def mixed_batch(seed=0):
  """Every kind of end, stale samples in the middle, and a row that is closed early."""
  go, end, cut = 'go', 'terminate', 'truncate'
  batch = make_batch([(go,) * 6, (go, end, go, go, go, go), (go, cut, go, cut, go, go)] * 2, seed)
  batch['valid'][2, 0] = batch['valid'][:2, 3] = False
  # Row 4 ends with a termination and is closed: what follows was never written.
  batch['played'][2:, 4] = batch['valid'][2:, 4] = False
  return batch


@functools.partial(jax.jit, static_argnames=FLAGS)
def loss_and_grads(batch, **options):
  traces.append(options)

  def loss(outputs):
    loss, metrics, _ = appo_loss(**(batch | outputs), **options)
    return loss, metrics

  outputs = {name: batch[name] for name in OUTPUTS if name in batch}
  (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(outputs)
  return value, metrics, grads


def run(batch, **options):
  """All scalars are passed, so that a test compiles only for new flags and shapes."""
  return loss_and_grads(jax.tree.map(jnp.asarray, batch), **SCALARS | options)


def recover(batch, **options):
  """Targets and weighted advantages that the loss used, read back from its gradients."""
  # Loss = mean(-log π · A) + mean((V - target)²):
  # dL/dlog π = -A / n and dL/dV = 2 (V - target) / n.
  _, metrics, grads = run(
    batch,
    **dict(use_clip=False, normalize_advantages=False, value_coef=1.0, value_clip=1e6) | options,
  )
  count = metrics['valid_count']
  return batch['values'][:-1] - grads['values'][:-1] * count / 2, -grads['log_prob_tm1'] * count


def test_masks_are_derived_in_order():
  """Catches an end missed at an unplayed slot or at `first`, and slot T taken for unplayed."""
  # Slots: go, truncated, (final), terminated, go | slot T.
  terminated = jnp.array([False, False, False, True, False])
  played = jnp.array([True, True, False, True, True])
  first = jnp.array([True, False, False, True, True, False])
  masks = transition_masks(terminated, first, played, gamma=0.5)
  np.testing.assert_array_equal(masks.discount_t, [0.5, 0.5, 0.5, 0.0, 0.5])
  np.testing.assert_array_equal(masks.done_t, [False, True, True, True, False])
  one = transition_masks(terminated[:1], first[:2], played[:1], gamma=jnp.array(0.5))
  np.testing.assert_array_equal(one.done_t, [False])
  with pytest.raises(AssertionError):  # ~ of an integer mask is true everywhere.
    transition_masks(terminated, first, played.astype(jnp.uint8), gamma=0.5)


def test_masked_mean_chooses_before_it_adds():
  """Catches x · mask, which keeps NaN, and a mean over all entries."""
  mask = jnp.array([True, False, True])
  mean = masked_mean({'x': jnp.array([1.0, jnp.nan, 5.0])}, mask)
  np.testing.assert_array_equal(mean['x'], 3.0)
  np.testing.assert_array_equal(masked_mean(jnp.ones(3), mask & False), 0.0)


@pytest.mark.parametrize('use_vtrace', [True, False])
def test_every_placement_of_ends_equals_a_per_episode_oracle(use_vtrace):
  """Catches a bootstrap from the wrong slot and a trace through any kind of end."""
  batch = make_batch(ALL_ROWS)
  targets, advantages = recover(batch, use_vtrace=use_vtrace)
  ratio = np.exp(batch['log_prob_tm1'] - batch['behaviour_log_prob'])
  for row in range(len(ALL_ROWS)):
    column = {name: x[:, row] for name, x in batch.items()}
    slots = np.flatnonzero(column['played'])
    # An episode's slots are consecutive; one ends where the next played slot is a `first`.
    breaks = [i for i in range(1, len(slots)) if column['first'][slots[i]]]
    for part in np.split(slots, breaks):
      v = column['values']
      episode = Trajectory(
        v[part], v[part + 1], column['rewards'][part], column['terminated'][part],
        np.zeros(len(part), bool), ratio[part, row],
      )  # fmt: skip
      if use_vtrace:
        expected = vtrace_sum(episode, 0.9, 1.2, 1.1)
        weight = np.minimum(1.2, episode.ratio)  # IMPALA's actor.
      else:
        expected, weight = gae_sum(episode, 0.9, 0.8), 1.0  # A2C's.
      np.testing.assert_allclose(targets[part, row], expected[0], rtol=1e-3, atol=1e-3)
      np.testing.assert_allclose(advantages[part, row], weight * expected[1], rtol=1e-3, atol=1e-3)


def test_the_surrogate_weights_by_the_ratio_once():
  """Catches Sample Factory's V-trace path, where the advantage is multiplied by ρ again."""
  # One step that terminates: A = r - V = 3 - 1 = 2. Ratio 2, inside the wide range, so
  # d loss / d log π = -ratio · A = -4; with ρ a second time (rho_bar = 10) it would be -8.
  batch = make_batch([('terminate',)]) | {
    'log_prob_tm1': np.log([[2.0]], dtype=np.float32),
    'behaviour_log_prob': np.zeros((1, 1), np.float32),
    'rewards': np.full((1, 1), 3.0, np.float32),
    'values': np.ones((2, 1), np.float32),
  }
  options = dict(rho_bar=10.0, ratio_max=10.0, normalize_advantages=False)
  _, _, grads = run(batch, **options)
  np.testing.assert_allclose(grads['log_prob_tm1'], [[-4.0]], rtol=1e-5)


@pytest.mark.parametrize(('use_vtrace', 'use_clip'), MODES)
def test_poison_in_invalid_slots_changes_nothing(use_vtrace, use_clip):
  """Catches arithmetic before `where`: 0 · NaN is NaN, in the loss or in the gradient."""
  batch = mixed_batch()
  invalid = ~batch['valid']
  # A value is needed by its own sample and, as a bootstrap, by an unterminated one before it.
  needed = np.zeros(batch['values'].shape, bool)
  needed[:-1] |= batch['valid']
  needed[1:] |= batch['valid'] & ~batch['terminated']
  assert (invalid & needed[:-1]).any() and (invalid & ~needed[:-1]).any()
  loss, metrics, grads = run(batch, use_vtrace=use_vtrace, use_clip=use_clip)
  assert np.isfinite(loss) and loss != 0
  for poison in (np.nan, np.inf, -np.inf, 1e30):
    bad = {name: x.copy() for name, x in batch.items()}
    for name in (*OUTPUTS[:4], 'behaviour_log_prob', 'behaviour_value', 'rewards'):
      bad[name][invalid] = poison
    bad['lag_tm1'][invalid] = -(2**31)
    bad['values'][~needed] = poison
    bad['terminated'][invalid] ^= True
    bad['first'][1:][invalid] ^= True
    bad_loss, bad_metrics, bad_grads = run(bad, use_vtrace=use_vtrace, use_clip=use_clip)
    for a, b in zip(
      jax.tree.leaves((loss, metrics, grads)),
      jax.tree.leaves((bad_loss, bad_metrics, bad_grads)),
      strict=True,
    ):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()  # Bit for bit.


def test_an_unplayed_slot_is_never_a_sample():
  """Catches `valid` taken alone: lag and generation say nothing about unplayed slots."""
  batch = mixed_batch()
  loose = batch | {'valid': batch['valid'] | ~batch['played']}
  np.testing.assert_array_equal(run(loose)[0], run(batch)[0])


@pytest.mark.parametrize('use_vtrace', [True, False])
def test_a_stale_slot_stops_the_trace_but_still_bootstraps(use_vtrace):
  """Catches a trace through a dropped sample, and its value lost to the sample before."""
  batch = make_batch(ALL_ROWS)
  assert ALL_ROWS[0] == ('go',) * 4
  batch['valid'][1, 0] = False
  targets, _ = recover(batch, use_vtrace=use_vtrace)
  v, r = batch['values'][:, 0], batch['rewards'][:, 0]
  rho = np.exp(batch['log_prob_tm1'] - batch['behaviour_log_prob'])[0, 0]
  rho = min(1.2, rho) if use_vtrace else 1.0
  np.testing.assert_allclose(targets[0, 0], v[0] + rho * (r[0] + 0.9 * v[1] - v[0]), rtol=1e-4)


@pytest.mark.parametrize(('use_vtrace', 'use_clip'), MODES)
def test_a_batch_without_a_sample_is_zero(use_vtrace, use_clip):
  """Catches 0 / 0 in the mean, in the normalisation and in the gradient."""
  batch = mixed_batch()
  batch['valid'][:] = False
  loss, metrics, grads = run(batch, use_vtrace=use_vtrace, use_clip=use_clip)
  assert loss == 0
  for x in jax.tree.leaves(grads):
    np.testing.assert_array_equal(x, 0.0)
  assert all(np.isfinite(x) for x in metrics.values())


def test_invalid_rows_do_not_dilute_the_mean():
  """Catches a mean over slots, and advantage statistics over invalid slots."""
  batch = mixed_batch()
  wider = {name: np.concatenate([x, x], 1) for name, x in batch.items()}
  wider['valid'][:, 6:] = False
  loss, metrics, grads = run(batch)
  wide_loss, wide_metrics, wide_grads = run(wider)
  np.testing.assert_allclose(wide_loss, loss, rtol=1e-5)
  for name in OUTPUTS:
    np.testing.assert_allclose(wide_grads[name][:, :6], grads[name], rtol=1e-4, atol=1e-7)
  np.testing.assert_allclose(wide_metrics.pop('valid_share') * 2, metrics.pop('valid_share'))
  for name, x in metrics.items():
    np.testing.assert_allclose(wide_metrics[name], x, rtol=1e-4, atol=1e-6, err_msg=name)


def test_devices_with_unequal_counts_add_up_to_the_whole_batch():
  """Catches a mean of means, local advantage statistics, and metrics of one device."""
  whole = mixed_batch()
  whole['valid'][1:, 3:] = False  # 15 samples against 2.
  assert whole['valid'][:, :3].sum() > 3 * whole['valid'][:, 3:].sum() > 0
  split = {k: jnp.stack([jnp.asarray(x[:, :3]), jnp.asarray(x[:, 3:])]) for k, x in whole.items()}
  one_device = functools.partial(loss_and_grads, axis_name='devices', **SCALARS)
  losses, metrics, grads = jax.vmap(one_device, axis_name='devices')(split)
  loss, whole_metrics, whole_grads = run(whole)
  np.testing.assert_allclose(losses.sum(), loss, rtol=1e-5)
  for name in OUTPUTS:
    joined = np.concatenate(list(grads[name]), 1)
    np.testing.assert_allclose(joined, whole_grads[name], rtol=1e-4, atol=1e-6)
  for name, x in whole_metrics.items():
    np.testing.assert_allclose(metrics[name], [x, x], rtol=1e-4, atol=1e-6, err_msg=name)


def test_normalised_advantages_have_no_scale():
  """Catches statistics over the wrong set, a variance for a deviation, a cancelling one-pass."""
  batch = mixed_batch()
  options = dict(use_vtrace=False, use_clip=False, gamma=0.0, exploration_coef=0.0, value_coef=0.0)
  _, metrics, grads = run(batch, **options)
  # γ = 0: A = r - V, normalised over the valid samples; dL/dlog π = -A / n.
  valid = batch['valid']
  raw = (batch['rewards'] - batch['values'][:-1])[valid]
  normal = -np.asarray(grads['log_prob_tm1'])[valid] * valid.sum()
  np.testing.assert_allclose(normal, (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(metrics['advantage_std'], raw.std(), rtol=1e-5)
  # 3 r - 3 V + 1000 (in float32 the mean square is 1e6, its last digit 0.06).
  scaled = batch | {'rewards': 3 * batch['rewards'] + 1000, 'values': 3 * batch['values']}
  again = -np.asarray(run(scaled, **options)[2]['log_prob_tm1'])[valid] * valid.sum()
  np.testing.assert_allclose(again, normal, atol=1e-3)


def test_equal_advantages_do_not_divide_by_zero():
  """Catches a missing floor under the standard deviation."""
  batch = mixed_batch() | {'rewards': np.ones((6, 6), np.float32)}
  batch['values'] = np.zeros_like(batch['values'])
  loss, _, grads = run(batch, gamma=0.0)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, grads)))


@pytest.mark.parametrize('use_vtrace', [True, False])
def test_values_learn_only_as_predictions(use_vtrace):
  """Catches a gradient through the target, the bootstrap or the advantage."""
  batch = mixed_batch()
  _, _, grads = run(batch, use_vtrace=use_vtrace, value_coef=0.0)
  np.testing.assert_array_equal(grads['values'], 0.0)
  _, _, grads = run(batch, use_vtrace=use_vtrace, value_clip=1e6)
  predicts = np.append(batch['valid'], np.zeros((1, 6), bool), 0)
  np.testing.assert_array_equal(np.asarray(grads['values']) != 0, predicts)


def test_exploration_and_kl_are_weighted_means_over_samples():
  """Catches a sign, a coefficient for the other's, and an entropy that still counts."""
  batch = mixed_batch()
  _, metrics, grads = run(batch, exploration_coef=0.5, kl_coef=0.25)
  per_sample = np.where(batch['valid'], 1.0 / metrics['valid_count'], 0.0)
  np.testing.assert_allclose(grads['exploration_tm1'], 0.5 * per_sample, rtol=1e-6)
  np.testing.assert_allclose(grads['kl_tm1'], 0.25 * per_sample, rtol=1e-6)
  np.testing.assert_array_equal(grads['entropy_tm1'], 0.0)
  np.testing.assert_allclose(metrics['kl'], batch['kl_tm1'][batch['valid']].mean(), rtol=1e-5)


def test_entropy_is_rewarded_unless_told_otherwise():
  """Catches the sign of the entropy term, and a KL that is there though nobody knows it."""
  batch = {name: x for name, x in mixed_batch().items() if name not in OPTIONAL}
  _, metrics, grads = run(batch, exploration_coef=0.5)
  expected = np.where(batch['valid'], -0.5 / metrics['valid_count'], 0.0)
  np.testing.assert_allclose(grads['entropy_tm1'], expected, rtol=1e-6)
  np.testing.assert_allclose(metrics['exploration_loss'], -metrics['entropy'], rtol=1e-6)
  assert 'kl' not in metrics and not any('lag' in name for name in metrics)


def prepare(batch):
  """What GAE says of a batch before the first of several updates."""
  facts = ('values', 'rewards', 'terminated', 'played', 'valid', 'first')
  arrays = (jnp.asarray(batch[name]) for name in facts)
  return gae(*neutral_transitions(*arrays, gamma=0.9), lambda_=0.8)


def test_prepared_targets_stay_when_values_move():
  """Catches GAE computed again from values that have moved since, or a gradient through it."""
  batch = mixed_batch()
  prepared = prepare(batch)
  options = dict(use_vtrace=False, value_clip=1e6, value_coef=1.0, kl_coef=0.0)
  for a, b in zip(
    jax.tree.leaves(run(batch, **options)),
    jax.tree.leaves(run(batch | {'prepared': prepared}, **options)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  batch['values'] += 3 + np.arange(7, dtype=np.float32)[:, None]
  _, metrics, grads = run(batch | {'prepared': prepared}, **options)
  # dL/dV = 2 (V - target) / n.
  targets = batch['values'][:-1] - grads['values'][:-1] * metrics['valid_count'] / 2
  valid = batch['valid']
  np.testing.assert_allclose(targets[valid], prepared.targets[valid], rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(
    metrics['advantage_mean'], run(mixed_batch(), **options)[1]['advantage_mean']
  )


def test_poison_in_prepared_slots_changes_nothing():
  """Catches invalid slots of what was prepared that enter the normalisation or the loss."""
  batch = mixed_batch()
  prepared = prepare(batch)
  expected = run(batch | {'prepared': prepared}, use_vtrace=False)
  for poison in (np.nan, np.inf, -np.inf, 1e30):
    bad = GAEOutput(*(jnp.where(batch['valid'], x, poison) for x in prepared))
    found = run(batch | {'prepared': bad}, use_vtrace=False)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()  # Bit for bit.


def test_metrics_by_hand():
  """Catches a wrong formula behind a plausible name; the third slot is unplayed."""
  # γ = 1/2, λ = 1, V = (1, 2, 8), no reward; slot 2 is the final observation of a truncation.
  # A1 = 1/2 · 8 - 2 = 2, A0 = (1/2 · 2 - 1) + 1/2 · A1 = 1; targets V + A = (2, 4).
  # Normalised A = (-1, 1). Ratio (2, 1), range [1/2, 3/2]:
  #   policy loss -min(-2, -1.5) = 2 and -1, mean 0.5.
  # Value loss, behaviour (1, 1), clip 1/2: (1 - 2)² = 1; max((2 - 4)², (1.5 - 4)²) = 6.25.
  # Loss 0.5 + 0.5 · 3.625 - 0.1 · 1 + 0.2 · 0.5 = 2.3125.
  batch = {
    'log_prob_tm1': [np.log(2), 0.0, 5.0],
    'entropy_tm1': [0.5, 1.5, 9.0],
    'values': [1.0, 2.0, 8.0, 3.0],
    'behaviour_log_prob': [0.0, 0.0, 0.0],
    'behaviour_value': [1.0, 1.0, 0.0],
    'rewards': [0.0, 0.0, 7.0],
    'kl_tm1': [0.25, 0.75, 9.0],
  }
  batch: Any = {name: np.array(x, np.float32) for name, x in batch.items()}
  batch['lag_tm1'] = np.array([3, 11, 3], np.int32)
  played, terminated, first = lay_out(('go', 'truncate', 'go'))
  batch |= {'played': played, 'valid': played, 'terminated': terminated, 'first': first}
  loss, metrics, _ = run(
    batch,
    **dict(gamma=0.5, gae_lambda=1.0, use_vtrace=False, rho_bar=1.5, ratio_min=0.5, ratio_max=1.5),
    **dict(value_coef=0.5, value_clip=0.5, exploration_coef=0.1, kl_coef=0.2),
  )
  expected = {
    'loss': 2.3125,
    'policy_loss': 0.5,
    'value_loss': 3.625,
    'entropy': 1.0,
    'exploration_loss': -1.0,
    'kl': 0.5,
    'approx_kl': ((2 - 1) - np.log(2)) / 2,
    'ratio_mean': 1.5,
    'ratio_max': 2.0,
    'ratio_p05': 1.0,
    'ratio_p50': 1.0,
    'ratio_p95': np.exp(0.69),  # The bin of log 2 = 0.693.
    'effective_sample_share': 9 / 10,  # (2 + 1)² / (2 · (4 + 1)).
    'policy_loss_lag_2_4': 2 / 2,
    'policy_loss_lag_10_up': -1 / 2,
    'value_loss_lag_2_4': 1 / 2,
    'value_loss_lag_10_up': 6.25 / 2,
    'share_lag_2_4': 0.5,
    'share_lag_10_up': 0.5,
    'clipped_share': 0.5,
    'explained_variance': 1 - 0.25 / 1.0,  # Errors (1, 2), targets (2, 4).
    'advantage_mean': 1.5,
    'advantage_std': 0.5,
    'value_mean': 1.5,
    'target_mean': 3.0,
    'rho_mean': 1.25,
    'valid_count': 2.0,
    'valid_share': 2 / 3,
  }
  for name in ('policy_loss', 'value_loss', 'share'):
    expected |= {f'{name}_lag_0_1': 0.0, f'{name}_lag_5_9': 0.0}
  assert set(metrics) == set(expected)
  for name, x in expected.items():
    np.testing.assert_allclose(metrics[name], x, rtol=1e-5, err_msg=name)
  np.testing.assert_allclose(loss, metrics['loss'], rtol=1e-6)


def test_every_scalar_is_traced_and_matters():
  """Catches a coefficient that is ignored, swapped for a constant, or forces a new compile."""
  batch = mixed_batch()
  for use_vtrace in (True, False):
    loss = run(batch, use_vtrace=use_vtrace)[0]
    compiled = len(traces)
    for name, x in SCALARS.items():
      changed = run(batch, use_vtrace=use_vtrace, **{name: x / 2})[0]
      unused = ('gae_lambda',) if use_vtrace else ('rho_bar', 'c_bar', 'vtrace_lambda')
      assert (changed == loss) == (name in unused), name
    assert len(traces) == compiled


@pytest.mark.parametrize(('use_vtrace', 'use_clip'), MODES)
def test_a_hopelessly_stale_sample_keeps_the_gradient_finite(use_vtrace, use_clip):
  """Catches exp overflowing to inf: a clipped step's gradient would be 0 · inf."""
  batch = mixed_batch()
  batch['log_prob_tm1'][0, :] += 200
  loss, _, grads = run(batch, use_vtrace=use_vtrace, use_clip=use_clip)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, grads)))


def test_a_broken_sample_is_not_hidden():
  """Catches masks that swallow a NaN of a valid sample: the learner must see it."""
  batch = mixed_batch()
  batch['log_prob_tm1'][0, 0] = np.nan
  assert np.isnan(run(batch)[0])


def test_further_axes_are_free():
  """Catches a fixed rank: [T, 6] and [T, 3, 2] are the same batch, [T] is a row of it."""
  batch = mixed_batch()
  folded = {name: x.reshape(len(x), 3, 2) for name, x in batch.items()}
  np.testing.assert_allclose(run(folded)[0], run(batch)[0], rtol=1e-6)
  row = {name: x[:, 1] for name, x in batch.items()}
  others = np.arange(6) != 1
  batch['valid'][:, others] = False
  np.testing.assert_allclose(run(row)[0], run(batch)[0], rtol=1e-6)
  with pytest.raises(AssertionError):
    run(batch | {'values': batch['values'][:-1]})
