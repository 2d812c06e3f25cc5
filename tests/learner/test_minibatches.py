"""Several updates on a batch: how it is divided, what stays the same, and when it is left."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from update_cases import (
  HYPERPARAMS,
  B,
  T,
  assert_close,
  gradient,
  network,
  random_batch,
  shared,
  small_config,
)

from sfjax.learner.devices import (
  first_replica,
  pmap_prepare,
  pmap_shuffled_update,
  replicate,
)
from sfjax.learner.minibatches import (
  Shuffle,
  leaves_batch,
  make_prepare,
  shuffled_update,
  take_minibatch,
)
from sfjax.learner.update import LearnerState, make_update
from sfjax.losses import GAEOutput
from tests.fakes import ENV

MINIBATCHES = 4
SIZE = B // MINIBATCHES
FIRST = Shuffle(seed=1, policy=0, version=10, epoch=0, index=0)


# How a batch is divided.


@functools.partial(jax.jit, static_argnames=('minibatches',))
def minibatch_of(batch, shuffle, minibatches=MINIBATCHES):
  return take_minibatch(batch, shuffle, minibatches=minibatches, axis_name=None)


def numbered(trajectories=B) -> Any:
  number = np.arange(trajectories)
  steps = np.arange(T)[:, None] * 100
  return {'core': number[:, None], 'rewards': steps + number, 'entry_version': np.int32(3)}


def order_of(shuffle: Shuffle) -> list[int]:
  """The trajectories of an epoch, in the order of its minibatches."""
  parts = [minibatch_of(numbered(), shuffle._replace(index=i)) for i in range(MINIBATCHES)]
  assert all(part['core'].shape == (SIZE, 1) for part in parts)
  return [int(number) for part in parts for number in part['core'][:, 0]]


def test_an_epoch_has_every_trajectory_once(compilations):
  """Catches a draw with replacement, an order that is drawn again for each minibatch, and fields
  of different trajectories side by side; also an index that compiles anew."""
  for epoch in range(6):
    assert sorted(order_of(FIRST._replace(epoch=epoch))) == list(range(B))
  compiled = len(compilations)
  parts = [
    jax.device_get(minibatch_of(numbered(), FIRST._replace(epoch=9, index=index)))
    for index in range(MINIBATCHES)
  ]
  assert len(compilations) == compiled
  for part in parts:
    assert part['rewards'].shape == (T, SIZE)
    np.testing.assert_array_equal(part['rewards'] % 100, np.tile(part['core'].T, (T, 1)))
    np.testing.assert_array_equal(part['rewards'][:, 0] // 100, np.arange(T))
    assert part['entry_version'] == 3


def test_the_order_comes_from_the_identity():
  """Catches an order that repeats, that depends on what ran before, or is not of the identity."""
  orders = [order_of(FIRST)] + [
    order_of(FIRST._replace(**{name: getattr(FIRST, name) + 1}))
    for name in ('seed', 'policy', 'version', 'epoch')
  ]
  assert len({tuple(order) for order in orders}) == len(orders)
  assert order_of(FIRST) == orders[0] != list(range(B))


def test_each_device_shuffles_its_own_share():
  """Catches one order for all devices, which would couple trajectories of the same workers."""
  batch = {'core': np.stack([np.arange(32)[:, None]] * 2)}
  take = functools.partial(take_minibatch, minibatches=2)
  part: Any = jax.pmap(take, axis_name='devices', in_axes=(0, None))(batch, FIRST)
  assert part['core'].shape == (2, 16, 1)
  assert len(set(part['core'][0, :, 0].tolist())) == 16
  assert (part['core'][0] != part['core'][1]).any()


def test_one_minibatch_is_the_batch_as_it_came():
  """Catches a gather, a copy and an order that nobody asked for."""
  np.testing.assert_array_equal(
    minibatch_of(numbered(), FIRST, minibatches=1)['rewards'], numbered()['rewards']
  )


def test_trajectories_that_cannot_be_divided_are_refused():
  """Catches trajectories that no minibatch ever has."""
  with pytest.raises(ValueError, match='8 trajectories .* learner.minibatches 3; use a divisor'):
    minibatch_of(numbered(), FIRST, minibatches=3)


# What the updates of a batch share.


@functools.cache
def programs(minibatches: int, use_vtrace: bool, pmapped=False) -> tuple[Any, Any]:
  """`prepare` and the update by gradient descent, without normalised advantages."""
  loss = small_config().loss
  loss.use_vtrace, loss.normalize_advantages = use_vtrace, False
  model, _ = network()
  axis = {} if pmapped else {'axis_name': None}
  options: Any = {'action': ENV.action, 'loss': loss, 'microbatch': T + 1} | axis
  update = make_update(model, optax.identity(), **options)
  step = shuffled_update(update, minibatches=minibatches, **axis)
  prepare = make_prepare(model, loss=loss, microbatch=T + 1)
  if pmapped:
    return pmap_prepare(prepare), pmap_shuffled_update(step)
  return jax.jit(prepare), jax.jit(step)


def start() -> LearnerState:
  return LearnerState(network()[1], optax.EmptyState(), jnp.int32(10), jnp.ones(()))


STEP = HYPERPARAMS._replace(learning_rate=1.0, max_grad_norm=0.0)


def plain(batch: Any, use_vtrace: bool) -> tuple[Any, dict[str, float]]:
  """Gradient and metrics of one update on the whole batch that nobody prepared."""
  options: Any = {'use_vtrace': use_vtrace, 'normalize_advantages': False, 'microbatch': T + 1}
  return gradient(batch, STEP, **options)


@pytest.mark.parametrize('use_vtrace', (True, False))
def test_gradients_of_minibatches_add_up_to_that_of_the_batch(use_vtrace):
  """Catches a trajectory in the wrong minibatch or none, facts of another, and targets that are
  not those of the batch."""
  batch: Any = random_batch()
  prepare, update = programs(MINIBATCHES, use_vtrace)
  prepared = prepare(start(), batch, STEP)
  added = {'entry_version'} if use_vtrace else {'entry_version', *GAEOutput._fields}
  assert set(prepared) == {*batch, *added}
  grads, counts = [], []
  for index in range(MINIBATCHES):
    after, metrics = update(start(), prepared, STEP, FIRST._replace(index=index))
    grads.append(jax.tree.map(lambda old, new: old - new, start().params, after.params))
    counts.append(float(metrics['valid_count']))
  assert len(set(counts)) > 1
  total = sum(counts)
  mean = jax.tree.map(lambda *leaves: sum(n * x for n, x in zip(counts, leaves)) / total, *grads)  # noqa: B905
  whole, metrics = plain(batch, use_vtrace)
  assert metrics['valid_count'] == total
  assert_close(mean, whole)


def run_epochs(use_vtrace: bool, *, epochs=2, **hyperparams: Any) -> list[list[dict[str, float]]]:
  """The metrics of every minibatch of every epoch on one batch, with long steps."""
  prepare, update = programs(MINIBATCHES, use_vtrace)
  coefficients: Any = {'learning_rate': 0.1} | hyperparams
  state, batch = start(), random_batch()
  options = STEP._replace(**coefficients)
  arrays = prepare(state, batch, options)
  metrics = []
  for epoch in range(epochs):
    metrics.append([])
    for index in range(MINIBATCHES):
      state, values = update(state, arrays, options, FIRST._replace(epoch=epoch, index=index))
      metrics[-1].append({name: float(value) for name, value in values.items()})
  assert state.version == 10 + epochs * MINIBATCHES
  return metrics


def mean_of(epoch: list[dict[str, float]], name: str) -> float:
  weights = [values['valid_count'] for values in epoch]
  return float(np.average([values[name] for values in epoch], weights=weights))


def test_gae_is_computed_once_and_vtrace_every_time():
  """Catches targets that chase the values of this very batch, and V-trace weights that stay those
  of the parameters that came in."""
  first, second = run_epochs(use_vtrace=False)
  assert abs(mean_of(first, 'value_mean') - mean_of(second, 'value_mean')) > 0.05
  for name in ('target_mean', 'advantage_mean'):
    assert mean_of(first, name) == pytest.approx(mean_of(second, name), abs=1e-5)
  first, second = run_epochs(use_vtrace=True)
  for name in ('target_mean', 'advantage_mean'):
    assert abs(mean_of(first, name) - mean_of(second, name)) > 0.01


def test_our_own_updates_do_not_make_samples_stale():
  """Catches a lag from the present version: here it would pass the limit in the first epoch."""
  first, second = run_epochs(use_vtrace=True, max_policy_lag=2)
  total = [sum(values['valid_count'] for values in epoch) for epoch in (first, second)]
  batch = random_batch()
  assert total[0] == total[1] == (batch['played'] & (batch['version'] == 8)).sum()
  assert {values['lag_updates_p50'] for values in first + second} == {2.0}


def test_one_epoch_of_one_minibatch_is_the_plain_update():
  """Catches another arithmetic on the way that most runs take: every bit must be the same."""
  batch: Any = random_batch()
  whole, metrics = plain(batch, use_vtrace=False)
  after, values = programs(1, False)[1](start(), batch, STEP, FIRST)
  found = jax.tree.map(lambda old, new: old - np.asarray(new), start().params, after.params)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(a, b)
  assert {name: float(value) for name, value in values.items()} == metrics


@pytest.mark.parametrize('empty_devices', (1, 2))
def test_an_empty_minibatch_is_no_update(compilations, empty_devices):
  """Catches a minibatch without samples that moves the state, on a device alone or on all, and
  programs that compile again for another minibatch, epoch or batch from the host."""
  prepare, update = programs(2, False, pmapped=True)
  host = shared(random_batch(), 2)
  state: Any = replicate(start())
  warm, _ = update(state, prepare(state, host, STEP), STEP, FIRST)
  jax.block_until_ready(warm)
  state = replicate(start())
  # Which trajectories of each device the second minibatch has.
  take = functools.partial(take_minibatch, minibatches=2)
  numbers = {'core': np.stack([np.arange(B // 2)[:, None]] * 2)}
  second = FIRST._replace(index=1)
  chosen: Any = jax.pmap(take, axis_name='devices', in_axes=(0, None))(numbers, second)['core']
  for device in range(empty_devices):
    host['played'][device][:, np.asarray(chosen[device, :, 0])] = False
  first_replica(state)
  compiled = len(compilations)
  arrays = prepare(state, host, STEP)
  state, metrics = update(state, arrays, STEP, second)
  applied = empty_devices == 1
  assert np.asarray(metrics['applied']).tolist() == [applied] * 2
  assert np.asarray(metrics['finite']).tolist() == [True] * 2
  moved = jax.tree.map(
    lambda new, old: bool((np.asarray(new)[0] != np.asarray(old)).any()),
    state.params,
    start().params,
  )
  assert any(jax.tree.leaves(moved)) == applied
  assert np.asarray(state.version).tolist() == [10 + applied] * 2
  state, metrics = update(state, arrays, STEP, FIRST._replace(epoch=1))
  assert first_replica(metrics)['applied'] and len(compilations) == compiled


# When a batch is left.


def values(**changed: float) -> dict[str, float]:
  return {'applied': 1.0, 'finite': 1.0, 'valid_count': 10.0, 'kl': 0.1} | changed


def test_a_batch_is_left_when_another_epoch_does_no_good():
  """Catches one empty minibatch taken for all, a mean of means, and a limit that is not one."""
  empty, broken = values(applied=0, valid_count=0, kl=0), values(applied=0, finite=0, kl=np.nan)
  assert not leaves_batch([values(), values()], max_kl=None)
  assert not leaves_batch([empty, values()], max_kl=None)
  assert leaves_batch([empty, empty], max_kl=None)
  assert leaves_batch([values(), broken], max_kl=None)
  # 10 samples of 0.1 and 30 of 0.02: 0.04 in the mean, 0.06 in the mean of means.
  uneven = [values(), values(valid_count=30.0, kl=0.02)]
  assert not leaves_batch(uneven, max_kl=0.041)
  assert leaves_batch(uneven, max_kl=0.039)
  assert not leaves_batch([values(kl=5.0), empty], max_kl=None)
