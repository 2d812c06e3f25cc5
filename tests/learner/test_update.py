"""The update: acted and learned numbers agree, devices and micro-batches are no matter, and what
must not be trained on changes nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from update_cases import (
  HYPERPARAMS,
  PIXELS,
  B,
  T,
  assert_close,
  gradient,
  gradient_update,
  network,
  pmap_update,
  random_batch,
  random_params,
  shared,
  small_config,
)

from sfjax import config as config_lib
from sfjax.inference.act import make_act
from sfjax.inference.policies import PublishedPolicies
from sfjax.inference.server import Server, batch_specs
from sfjax.learner.devices import first_replica, replicate
from sfjax.learner.optimizer import make_optimizer
from sfjax.learner.update import (
  Hyperparams,
  LearnerState,
  Update,
  default_microbatch,
  init_state,
  make_update,
  ratio_limits,
)
from sfjax.metrics.records import LAG_METRICS
from sfjax.models.actor_critic import ActorCritic, make_model
from sfjax.models.flat_params import flat_nbytes, flatten_params
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.params import ParameterBuffer
from tests.fakes import (
  BOTH,
  CORE_SIZE,
  ENV,
  TERMINATED,
  TRUNCATED,
  FakeEnv,
  make_split,
  make_timer,
  make_transport,
  take_rows,
)

# Acting and learning.


class NoisyEnv(FakeEnv):
  """A fake environment with observations that are all over the place."""

  def __init__(self, stream: int, script: Any) -> None:
    super().__init__(stream, script)
    self._rng = np.random.default_rng(stream)

  def _say(self) -> np.ndarray:
    self._obs = self._rng.normal(size=3).astype(np.float32)
    return self._obs


def acted_rows(model: ActorCritic, params: Any, *, count: int) -> list[dict[str, np.ndarray]]:
  """Lets a policy play through split and server, and returns `count` rows of every stream."""
  transport = make_transport(envs=8, rollout=T)
  topology = transport.topology
  buffer = ParameterBuffer(SharedBlock(), num_policies=1, nbytes=flat_nbytes(params), allocate=True)
  buffer.publish(0, 3, flatten_params(params))
  server = Server(
    policies=PublishedPolicies(
      make_act(model, ENV.action),
      template=jax.eval_shape(lambda: params),
      params=buffer,
      num_policies=1,
      specs=batch_specs(topology, ENV, CORE_SIZE),
    ),
    num_policies=1,
    topology=topology,
    slab=transport.slab,
    streams=transport.streams,
    requests=transport.requests,
    replies=transport.replies,
    timer=make_timer(transport),
    acted=np.zeros(1, np.int64),
    learner_versions=np.zeros(1, np.int64),
    seed=0,
  )
  # Stream i has episodes of i + 1 steps, so that ends of every kind come at every slot.
  ends = (TRUNCATED, TERMINATED, TRUNCATED, BOTH)
  envs = [NoisyEnv(i, [(i + 1, ends[(i + j) % 4]) for j in range(200)]) for i in range(8)]
  split = make_split(transport, envs)
  split.start()
  rows: dict[int, list[dict[str, np.ndarray]]] = {i: [] for i in range(8)}
  while any(len(stream_rows) < count for stream_rows in rows.values()):
    split.request()
    server.turn()
    for reply in transport.replies[0].get_all():
      split.receive(int(reply['tick']), int(reply['served']))
    split.step()
    for stream, taken in take_rows(transport).items():
      rows[stream] += taken
    assert split.open_held_rows()
  return [row for stream_rows in rows.values() for row in stream_rows[:count]]


def as_batch(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  names = ('obs/obs', 'first', 'actions', 'behaviour_log_prob', 'behaviour_value')
  names += ('rewards', 'terminated', 'played', 'version', 'learner_version')
  batch = {name: np.stack([row[name] for row in rows], axis=1) for name in names}
  batch['actions'] = batch['actions'].reshape(*batch['rewards'].shape, ENV.action.size)
  return batch | {'core': np.stack([row['core'] for row in rows])}


def replay(
  model: ActorCritic, params: Any, batch: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """What a policy says of a batch: log-probabilities of its actions, and values, both [T, B]."""
  steps, b, *_ = batch['obs/obs'].shape
  features: Any = model.apply(params, {'obs': batch['obs/obs'].reshape(-1, 3)}, method='encode')
  output: Any = model.apply(
    params, features.reshape(steps, b, -1), batch['core'], batch['first'], method='unroll'
  )
  log_probs = np.asarray(jax.nn.log_softmax(output.logits[:-1]))
  of_actions = np.take_along_axis(log_probs, batch['actions'], axis=-1)[..., 0]
  return of_actions, np.asarray(output.values[:-1])


@pytest.mark.parametrize('core', list(config_lib.Core))
def test_the_learner_replays_what_was_acted(core):
  """Catches two reset rules, a core stored one step off, a final observation fed to the wrong
  core, and facts in a wrong slot: the ratio of the first update must be 1."""
  model, params = network(core)
  batch = as_batch(acted_rows(model, params, count=5))
  assert batch['played'].mean() < 0.9 and batch['terminated'].any()
  replayed, values = replay(model, params, batch)
  played = batch['played']
  np.testing.assert_allclose(replayed[played], batch['behaviour_log_prob'][played], atol=1e-4)
  np.testing.assert_allclose(values[played], batch['behaviour_value'][played], atol=1e-4)
  assert np.ptp(replayed[played]) > 0.5, 'a policy so even proves nothing'
  update = jax.jit(
    make_update(
      model,
      optax.identity(),
      action=ENV.action,
      loss=small_config().loss,
      microbatch=40,
      axis_name=None,
    )
  )
  state = LearnerState(params, optax.EmptyState(), jnp.int32(3), jnp.ones(()))
  arrays: Any = batch
  _, metrics = update(state, arrays, HYPERPARAMS)
  assert float(metrics['ratio_max']) == pytest.approx(1.0, abs=2e-4)
  assert float(metrics['ratio_mean']) == pytest.approx(1.0, abs=1e-5)
  assert float(metrics['approx_kl']) == pytest.approx(0.0, abs=1e-7)
  assert float(metrics['clipped_share']) == 0.0
  assert (float(metrics['valid_count']), float(metrics['lag_updates_max'])) == (played.sum(), 0)


# Devices and micro-batches.


def lopsided_batch(seed=0, **options: Any) -> dict[str, np.ndarray]:
  """A batch whose second half, another device's share, has few samples and other rewards."""
  batch = random_batch(seed, **options)
  batch['played'][1:, B // 2 :] = False
  batch['rewards'][:, B // 2 :] += 3
  return batch


@pytest.mark.parametrize('microbatch', (1, 4, 4 * (T + 1)))
def test_two_devices_and_any_micro_batch_give_the_gradient_of_one(microbatch):
  """Catches a mean of means, statistics of a device's own advantages, a gradient that is
  averaged or not added up, and a micro-batch that is lost, counted twice or out of order."""
  batch = lopsided_batch()
  counts = [shared(batch, 2)['played'][i].sum() for i in (0, 1)]
  assert counts[0] > 4 * counts[1] > 0
  expected, expected_metrics = gradient(batch)
  grads, metrics = gradient(batch, microbatch=microbatch, devices=2)
  assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0.1
  assert_close(grads, expected)
  assert_close(metrics, expected_metrics)


def test_a_device_without_a_sample_takes_part():
  """Catches a division by its own count."""
  batch = lopsided_batch()
  batch['played'][:, B // 2 :] = False
  options = {'use_vtrace': False, 'exploration': config_lib.Exploration.SYMMETRIC_KL}
  expected, expected_metrics = gradient(batch, **options)
  grads, metrics = gradient(batch, microbatch=4, devices=2, **options)
  assert_close(grads, expected)
  assert_close(metrics, expected_metrics)


def test_the_encoder_of_pixels_goes_through_devices_and_micro_batches():
  """Catches a gradient of our own convolution that does not survive the device loop."""
  config = small_config(config_lib.Core.NONE)
  config.model.encoder = config_lib.Encoder.CONV_SIMPLE
  params = random_params(make_model(config, PIXELS), PIXELS, 0)
  batch = lopsided_batch(env=PIXELS) | {'core': np.zeros((B, 0), np.float32)}
  options = {'params': params, 'pixels': True}
  expected, expected_metrics = gradient(batch, **options)
  grads, metrics = gradient(batch, microbatch=4, devices=2, **options)
  size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
  assert size > 0.01
  assert_close(grads, expected, 1e-4 * max(size, 1.0))
  assert_close(metrics, expected_metrics, 1e-4)


def test_the_default_micro_batch_divides_the_batch():
  """Catches one that does not, that is larger than the cache, or small on an accelerator."""
  simple = config_lib.Encoder.CONV_SIMPLE
  for observations in (1, 7, 33 * 32, 33 * 31, 37, 64):
    size = default_microbatch(observations, 'cpu', simple)
    assert observations % size == 0 and size <= 32
    assert default_microbatch(observations, 'cuda', simple) == observations
  assert [default_microbatch(n, 'cpu', simple) for n in (37, 64, 33 * 32)] == [1, 32, 32]
  assert default_microbatch(64, 'cpu', config_lib.Encoder.RESNET) == 4


# What must change nothing.


@functools.cache
def adam_update() -> Update:
  config = small_config()
  return pmap_update(
    make_update(
      network()[0],
      make_optimizer('adam', eps=1e-6),
      action=ENV.action,
      loss=config.loss,
      microbatch=T + 1,
    )
  )


def trained_state() -> LearnerState:
  """A replicated state after two updates, so that nothing in it is zero."""
  state: Any = replicate(init_state(network()[1], make_optimizer('adam', eps=1e-6)))
  for seed in range(2):
    state, metrics = adam_update()(state, shared(random_batch(seed), 2), HYPERPARAMS)
    assert first_replica(metrics)['applied']
  return state


def nothing_played(batch):
  batch['played'][:] = False


def everything_stale(batch):
  batch['version'][:] = -5


def nan_reward(batch):
  batch['played'][2, -1], batch['version'][2, -1] = True, 2
  batch['rewards'][2, -1] = np.nan


def nan_observation(batch):
  batch['played'][0, 0], batch['version'][0, 0] = True, 2
  batch['obs/obs'][0, 0] = np.nan


def huge_reward(batch):
  batch['played'][2, -1], batch['version'][2, -1] = True, 2
  batch['rewards'][2, -1] = 1e30


def check_unchanged(
  batch: dict[str, np.ndarray], hyperparams: Hyperparams = HYPERPARAMS, *, empty=False
) -> None:
  """Checks that an update changes nothing, not a bit on any device, and that the next one does."""
  state = trained_state()
  before = jax.tree.map(lambda leaf: np.array(leaf), state)
  after, metrics = adam_update()(state, shared(batch, 2), hyperparams)
  assert jax.tree.structure(after) == jax.tree.structure(before)
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    assert np.asarray(new).tobytes() == old.tobytes()
  assert np.asarray(metrics['applied']).tolist() == [False, False]
  assert np.asarray(metrics['finite']).tolist() == [empty, empty]
  again, metrics = adam_update()(after, shared(random_batch(8), 2), HYPERPARAMS)
  assert first_replica(metrics)['applied']
  assert np.asarray(again.version).tolist() == [3, 3]


@pytest.mark.parametrize('spoil', (nothing_played, everything_stale))
def test_an_empty_batch_leaves_the_state_bit_for_bit(spoil):
  """Catches a version, a moment or a count that moves on."""
  batch = random_batch(7)
  spoil(batch)
  check_unchanged(batch, empty=True)


@pytest.mark.parametrize('spoil', (nan_reward, nan_observation, huge_reward))
def test_a_non_finite_batch_leaves_the_state_bit_for_bit(spoil):
  """Catches a NaN that gets into the moments, and a device that goes alone."""
  batch = random_batch(7)
  spoil(batch)
  check_unchanged(batch)


def test_a_gradient_that_overflows_leaves_the_state_bit_for_bit():
  """Catches a look at the loss alone: here it is finite, and the norm of its gradient is not."""
  batch, hyperparams = random_batch(7), HYPERPARAMS._replace(value_coef=1e35)
  _, metrics = gradient(batch, hyperparams)
  assert np.isfinite(metrics['loss'])
  check_unchanged(batch, hyperparams)


def test_a_sample_is_stale_when_its_lag_is_above_the_limit():
  """Catches >= for >, and a lag that is counted from another version."""
  batch = random_batch()
  batch['played'][:] = True
  batch['version'][:] = 10 - np.arange(T)[:, None]  # Lag t at slot t, at version 10.
  for limit in (0, 2, 5):
    _, metrics = gradient(batch, HYPERPARAMS._replace(max_policy_lag=limit))
    assert metrics['valid_count'] == (limit + 1) * B
    assert (metrics['played_count'], metrics['lag_updates_max']) == (T * B, T - 1)
    assert metrics['lag_updates_mean'] == pytest.approx((T - 1) / 2)
    assert (metrics['lag_updates_p50'], metrics['lag_updates_p90']) == (T // 2 - 1, T - 1)
    assert metrics['dropped_share'] == pytest.approx(1 - (limit + 1) / T)
    of_10 = metrics['share_lag_0_1'] * (limit + 1)
    assert of_10 == pytest.approx(min(limit + 1, 2))


def test_lag_is_told_apart_by_its_causes():
  """Catches causes that are swapped, do not add up, or count what was not played."""
  batch = random_batch()
  batch['played'][:] = False
  batch['played'][0] = True
  batch['version'][:] = batch['learner_version'][:] = -77
  batch['version'][0], batch['learner_version'][0] = 3, 7
  batch['version'][0, 0], batch['learner_version'][0, 0] = 7, 10
  # At version 10 all but one of the B samples acted 4 versions late and then waited for 3; the
  # other one acted 3 late and did not wait.
  _, metrics = gradient(batch)
  assert metrics['lag_updates_stale_mean'] == pytest.approx(4 - 1 / B)
  assert metrics['lag_updates_backlog_mean'] == pytest.approx(3 * (B - 1) / B)
  assert metrics['lag_updates_mean'] == pytest.approx(7 - 4 / B)
  assert metrics['lag_updates_max'] == 7
  names = [f'lag_updates_{c}_{s}' for c in ('stale', 'backlog') for s in ('p50', 'p90', 'max')]
  assert [metrics[name] for name in names] == [4, 4, 4, 3, 3, 3]


@pytest.mark.parametrize(
  ('use_vtrace', 'exploration'),
  ((True, config_lib.Exploration.SYMMETRIC_KL), (False, config_lib.Exploration.ENTROPY)),
)
def test_what_is_no_valid_sample_changes_not_a_bit(use_vtrace, exploration):
  """Catches facts of a stale or unplayed slot that are used, even as 0 · NaN, or counted."""
  batch = random_batch()
  stale = batch['version'] == 2  # Lag 8 at version 10, and the limit is 6.
  assert 0.1 < stale.mean() < 0.4
  invalid = stale | ~batch['played']
  options: Any = {'use_vtrace': use_vtrace, 'exploration': exploration}
  expected = gradient(batch, **options)
  assert expected[1]['valid_count'] == (~invalid).sum()
  for poison in (np.nan, np.inf, -np.inf, 1e30):
    bad = {name: array.copy() for name, array in batch.items()}
    for name in ('rewards', 'behaviour_log_prob', 'behaviour_value', 'behaviour_params'):
      bad[name][invalid] = poison
    bad['actions'][invalid] = 2**31 - 1 if poison == 1e30 else -7
    found = gradient(bad, **options)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_rows_of_stale_samples_are_as_good_as_absent():
  """Catches a mean over slots that were not valid."""
  batch = random_batch()
  batch['version'][:, 5:] = 0
  batch['version'][:, :5] = 9
  part = {n: a[:5] if n == 'core' else a[:, :5] for n, a in batch.items()}
  whole, metrics = gradient(batch)
  alone, alone_metrics = gradient(part, microbatch=5 * (T + 1))
  assert_close(whole, alone)
  of_played = {'played_count', 'dropped_share', 'valid_share', *LAG_METRICS}
  for name in set(metrics) - of_played:
    assert metrics[name] == pytest.approx(alone_metrics[name], rel=1e-5, abs=1e-6), name


# The device program.


CHANGED = HYPERPARAMS._replace(
  learning_rate=2e-4,
  kl_threshold=100.0,
  min_learning_rate=5e-4,
  max_learning_rate=5e-5,
  max_grad_norm=0.01,
  max_policy_lag=9,
  gamma=0.5,
  rho_bar=0.7,
  c_bar=0.6,
  vtrace_lambda=0.5,
  gae_lambda=0.5,
  ratio_min=0.6,
  ratio_max=1.5,
  value_coef=1.0,
  value_clip=0.05,
  exploration_coef=0.5,
  kl_coef=0.5,
)


@pytest.mark.parametrize('field', Hyperparams._fields)
def test_each_hyperparameter_is_traced_and_counts(field, compilations):
  """Catches one that is baked into the program, or read from nowhere."""
  adapts = field in ('kl_threshold', 'min_learning_rate', 'max_learning_rate')
  options: Any = {'adapts_rate': True} if adapts else {}
  update = gradient_update(B * (T + 1), 1, use_vtrace=field != 'gae_lambda', **options)
  state = LearnerState(network()[1], optax.EmptyState(), jnp.int32(10), jnp.ones(()))
  arrays: Any = random_batch()
  changed = HYPERPARAMS._replace(**{field: getattr(CHANGED, field)})
  before, _ = update(state, arrays, HYPERPARAMS)
  compiled = len(compilations)
  after, _ = update(state, arrays, changed)
  assert len(compilations) == compiled
  parts = [(state.params, state.rate_factor) for state in (before, after)]
  differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), *parts)
  assert max(jax.tree.leaves(differences)) > 1e-6


def test_the_range_of_the_ratio_by_its_style():
  """Catches 1 - c for 1 / (1 + c), and the reverse."""
  assert ratio_limits(0.25, config_lib.RatioRange.RATIO) == (0.8, 1.25)
  assert ratio_limits(0.25, config_lib.RatioRange.SYMMETRIC) == (0.75, 1.25)


def test_nothing_recompiles_after_the_first_update(compilations):
  """Catches a second compilation for the state that the first update returns, or for metrics."""
  state = trained_state()
  compiled = len(compilations)
  for seed, hyperparams in enumerate((HYPERPARAMS, CHANGED, HYPERPARAMS)):
    state, metrics = adam_update()(state, shared(random_batch(seed), 2), hyperparams)
    first_replica(metrics)
    first_replica(state)
  assert len(compilations) == compiled


def test_fresh_trained_and_restored_states_run_one_program(compilations):
  """Catches `replicate` placing a state in another way than the update returns it."""
  model, params = network(config_lib.Core.NONE)
  options = {'action': ENV.action, 'loss': small_config().loss, 'microbatch': T + 1}
  update = pmap_update(make_update(model, make_optimizer('adam', eps=1e-6), **options))
  state: Any = replicate(init_state(params, make_optimizer('adam', eps=1e-6)))
  batch = shared(random_batch(), 2)
  state, _ = update(state, batch, HYPERPARAMS)
  compiled = len(compilations)
  state, _ = update(state, batch, HYPERPARAMS)
  assert len(compilations) == compiled
  restored: Any = replicate(jax.tree.map(np.array, first_replica(state)))
  compiled = len(compilations)
  state, _ = update(restored, batch, HYPERPARAMS)
  assert len(compilations) == compiled
  assert first_replica(state).version == 3


def test_the_old_state_is_donated():
  """Catches a second copy of parameters and moments in the memory of every device."""
  state = trained_state()
  adam_update()(state, shared(random_batch(), 2), HYPERPARAMS)
  kept = [leaf.shape for leaf in jax.tree.leaves(state) if not leaf.is_deleted()]
  assert kept == []


def test_the_loss_falls_on_a_fixed_batch():
  """Catches a step against the gradient's sign, and an optimizer that stands still."""
  model, params = network()
  batch = random_batch(3)
  batch['behaviour_log_prob'], batch['behaviour_value'] = replay(model, params, batch)
  state: Any = replicate(init_state(params, make_optimizer('adam', eps=1e-6)))
  losses = []
  for _ in range(40):
    hyperparams = HYPERPARAMS._replace(learning_rate=3e-3, max_policy_lag=1000)
    state, metrics = adam_update()(state, shared(batch, 2), hyperparams)
    losses.append([float(metrics[name][0]) for name in ('loss', 'policy_loss', 'value_loss')])
  loss, policy_loss, value_loss = np.transpose(losses)
  assert policy_loss[0] == pytest.approx(0.0, abs=1e-3)  # Advantages have mean 0.
  assert policy_loss[-1] < -0.02
  assert value_loss[-1] < 0.9 * value_loss[0]
  assert loss[-1] < loss[0] - 0.02


def test_a_large_gradient_is_scaled_to_the_limit():
  """Catches a clip of every leaf by itself, and one before devices are added up."""
  batch = random_batch()
  grads, metrics = gradient(batch)
  norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
  assert metrics['grad_norm'] == pytest.approx(norm, rel=1e-4)
  params = network()[1]
  for limit, scale in ((norm / 4, 0.25), (norm * 4, 1.0)):
    state: Any = replicate(LearnerState(params, optax.EmptyState(), jnp.int32(10), jnp.ones(())))
    hyperparams = HYPERPARAMS._replace(learning_rate=1.0, max_grad_norm=float(limit))
    state, _ = gradient_update(4, 2)(state, shared(batch, 2), hyperparams)
    step = jax.tree.map(lambda old, new: old - new, params, first_replica(state).params)
    assert_close(step, jax.tree.map(lambda g, s=scale: s * g, grads))
