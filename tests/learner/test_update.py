"""The update: acted and learned numbers agree, devices and micro-batches are no matter, and what
must not be trained on changes nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sfjax import config as config_lib
from sfjax.inference.act import make_act
from sfjax.inference.policies import PublishedPolicies
from sfjax.inference.server import Server, batch_specs
from sfjax.learner.devices import first_replica, pmap_update, replicate
from sfjax.learner.optimizer import make_optimizer
from sfjax.learner.update import (
  Hyperparams,
  LearnerState,
  Update,
  default_microbatch,
  init_state,
  make_hyperparams,
  make_update,
)
from sfjax.metrics.records import LAG_METRICS
from sfjax.models.actor_critic import ActorCritic, init_params, make_model
from sfjax.models.flat_params import flat_nbytes, flatten_params
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.params import ParameterBuffer
from sfjax.specs import EnvSpec, array_spec
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

T, B = 6, 8
PIXELS = EnvSpec({'obs': array_spec(np.uint8, 36, 36, 3)}, num_actions=4)


def small_config(core=config_lib.Core.GRU) -> config_lib.Config:
  config = config_lib.Config()
  config.model.encoder = config_lib.Encoder.MLP
  config.model.mlp_layers = (8,)
  config.model.core, config.model.core_size = core, CORE_SIZE
  config.model.encoder_size = 8
  config.learner.rollout, config.learner.batch_size = T, T * B
  return config


def random_params(model: ActorCritic, env: EnvSpec, core_size: int, seed=0) -> Any:
  """Large random numbers, so that no part of the network is close to linear or to uniform."""
  shapes = jax.eval_shape(lambda key: init_params(model, key, env, core_size), jax.random.key(0))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / max(leaf.size // 64, 1) ** 0.5,
    shapes,
  )


def random_batch(seed=0, *, env=ENV, b=B) -> dict[str, np.ndarray]:
  """A batch [T, B] with every kind of end, ratios that are not 1, and one sample in five old."""
  rng = np.random.default_rng(seed)
  obs = {name: rng.normal(size=(T + 1, b, *spec.shape)) * 40 for name, spec in env.obs.items()}
  batch = {
    f'obs/{name}': np.abs(obs[name]).astype(spec.dtype)
    if spec.dtype == np.uint8
    else (obs[name] / 40).astype(spec.dtype)
    for name, spec in env.obs.items()
  }
  first = rng.random((T + 1, b)) < 0.15
  played = rng.random((T, b)) < 0.85
  batch |= {
    'first': first,
    'actions': rng.integers(0, env.num_actions, (T, b)).astype(np.int32),
    'behaviour_log_prob': rng.uniform(-2.5, -0.5, (T, b)).astype(np.float32),
    'behaviour_value': rng.normal(size=(T, b)).astype(np.float32),
    'rewards': rng.normal(size=(T, b)).astype(np.float32),
    'terminated': first[1:] & played & (rng.random((T, b)) < 0.5),
    'played': played,
    'version': np.where(rng.random((T, b)) < 0.2, 2, 8).astype(np.int32),
    'learner_version': rng.integers(8, 10, (T, b)).astype(np.int32),
    'core': rng.normal(size=(b, CORE_SIZE)).astype(np.float32),
  }
  return batch


def shared(batch: dict[str, np.ndarray], devices: int) -> Any:
  """The batch as the batcher lays it out: the first B / devices rows to the first device."""

  def split(name: str, array: np.ndarray) -> np.ndarray:
    axis = 0 if name == 'core' else 1
    return np.stack(np.split(array, devices, axis))

  return {name: split(name, array) for name, array in batch.items()}


HYPERPARAMS = make_hyperparams(small_config())._replace(gamma=0.9, max_policy_lag=6)


@functools.cache
def network(core=config_lib.Core.GRU) -> tuple[ActorCritic, Any]:
  config = small_config(core)
  model = make_model(config, ENV)
  return model, random_params(model, ENV, config_lib.core_size(config))


@functools.cache
def gradient_update(microbatch: int, devices: int, *, use_vtrace=True, pixels=False) -> Update:
  """An update by plain gradient descent: with a learning rate of 1 the step is the gradient."""
  config = small_config(config_lib.Core.NONE if pixels else config_lib.Core.GRU)
  config.loss.use_vtrace = use_vtrace
  if pixels:
    config.model.encoder = config_lib.Encoder.CONV
  update = make_update(
    make_model(config, PIXELS if pixels else ENV),
    optax.identity(),
    loss=config.loss,
    microbatch=microbatch,
    **({'axis_name': None} if devices == 1 else {}),
  )
  return pmap_update(update) if devices > 1 else jax.jit(update)


def gradient(
  batch: dict[str, np.ndarray],
  hyperparams: Hyperparams = HYPERPARAMS,
  *,
  params: Any = None,
  microbatch=B * (T + 1),
  devices=1,
  **options: Any,
) -> tuple[Any, dict[str, float]]:
  """The unclipped gradient of the mean loss at version 10, and the metrics."""
  params = network()[1] if params is None else params
  state = LearnerState(params, optax.EmptyState(), jnp.int32(10))
  update = gradient_update(microbatch, devices, **options)
  hyperparams = hyperparams._replace(learning_rate=1.0, max_grad_norm=0.0)
  if devices > 1:
    replicas, metrics = update(replicate(state), shared(batch, devices), hyperparams)
    for leaf in jax.tree.leaves((replicas, metrics)):
      np.testing.assert_array_equal(leaf[0], leaf[1], 'the devices do not agree')
    after, metrics = first_replica(replicas), first_replica(metrics)
  else:
    arrays: Any = batch
    after, metrics = update(state, arrays, hyperparams)
  grads = jax.tree.map(lambda old, new: old - np.asarray(new), params, after.params)
  return grads, {name: float(value) for name, value in metrics.items()}


def assert_close(one: Any, other: Any, tolerance=1e-5) -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
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
      make_act(model),
      template=jax.eval_shape(lambda: params),
      params=buffer,
      num_policies=1,
      specs=batch_specs(topology, ENV.obs, CORE_SIZE),
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
  of_actions = np.take_along_axis(log_probs, batch['actions'][..., None], axis=-1)[..., 0]
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
  assert np.ptp(replayed[played]) > 1.0, 'a policy so even proves nothing'
  update = jax.jit(
    make_update(model, optax.identity(), loss=small_config().loss, microbatch=40, axis_name=None)
  )
  state = LearnerState(params, optax.EmptyState(), jnp.int32(3))
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
  expected, expected_metrics = gradient(batch)
  grads, metrics = gradient(batch, microbatch=4, devices=2)
  assert_close(grads, expected)
  assert_close(metrics, expected_metrics)


def test_the_encoder_of_pixels_goes_through_devices_and_micro_batches():
  """Catches a gradient of our own convolution that does not survive the device loop."""
  config = small_config(config_lib.Core.NONE)
  config.model.encoder = config_lib.Encoder.CONV
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
  for observations in (1, 7, 33 * 32, 33 * 31, 37, 64):
    size = default_microbatch(observations, 'cpu')
    assert observations % size == 0 and size <= 32
    assert default_microbatch(observations, 'cuda') == observations
  assert [default_microbatch(n, 'cpu') for n in (37, 64, 33 * 32)] == [1, 32, 32]


# What must change nothing.


@functools.cache
def adam_update() -> Update:
  config = small_config()
  return pmap_update(
    make_update(network()[0], make_optimizer(1e-6), loss=config.loss, microbatch=T + 1)
  )


def trained_state() -> LearnerState:
  """A replicated state after two updates, so that nothing in it is zero."""
  state: Any = replicate(init_state(network()[1], make_optimizer(1e-6)))
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


@pytest.mark.parametrize('use_vtrace', (True, False))
def test_stale_samples_change_neither_loss_nor_gradient(use_vtrace):
  """Catches facts of a stale sample that are used, even as 0 · NaN, and a count of all."""
  batch = random_batch()
  stale = batch['version'] == 2  # Lag 8 at version 10, and the limit is 6.
  assert 0.1 < stale.mean() < 0.4
  other = {name: array.copy() for name, array in batch.items()}
  for name in ('rewards', 'behaviour_log_prob', 'behaviour_value'):
    other[name][stale] = np.nan
  other['actions'][stale] = 3 - other['actions'][stale]
  one, metrics = gradient(batch, use_vtrace=use_vtrace)
  two, other_metrics = gradient(other, use_vtrace=use_vtrace)
  assert_close(two, one, 1e-7)
  for name in metrics:
    assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-6, abs=1e-7), name
  assert metrics['valid_count'] == (batch['played'] & ~stale).sum()


def test_rows_of_stale_samples_are_as_good_as_absent():
  """Catches a mean over slots that were not valid."""
  batch = random_batch()
  batch['version'][:, 5:] = 0
  batch['version'][:, :5] = 9
  part = {n: a[:5] if n == 'core' else a[:, :5] for n, a in batch.items()}
  whole, metrics = gradient(batch)
  alone, alone_metrics = gradient(part, microbatch=5 * (T + 1))
  assert_close(whole, alone)
  for name in set(metrics) - {'played_count', 'valid_share', *LAG_METRICS}:
    assert metrics[name] == pytest.approx(alone_metrics[name], rel=1e-5, abs=1e-6), name


# The device program.


CHANGED = HYPERPARAMS._replace(
  learning_rate=2e-4,
  max_grad_norm=0.01,
  max_policy_lag=9,
  gamma=0.5,
  rho_bar=0.7,
  c_bar=0.6,
  gae_lambda=0.5,
  ratio_min=0.6,
  ratio_max=1.5,
  value_coef=1.0,
  value_clip=0.05,
  entropy_coef=0.1,
)


@pytest.mark.parametrize('field', Hyperparams._fields)
def test_each_hyperparameter_is_traced_and_counts(field, compilations):
  """Catches one that is baked into the program, or read from nowhere."""
  update = gradient_update(B * (T + 1), 1, use_vtrace=field != 'gae_lambda')
  state = LearnerState(network()[1], optax.EmptyState(), jnp.int32(10))
  arrays: Any = random_batch()
  changed = HYPERPARAMS._replace(**{field: getattr(CHANGED, field)})
  before, _ = update(state, arrays, HYPERPARAMS)
  compiled = len(compilations)
  after, _ = update(state, arrays, changed)
  assert len(compilations) == compiled
  differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), before.params, after.params)
  assert max(jax.tree.leaves(differences)) > 1e-6


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
  loss = small_config().loss
  update = pmap_update(make_update(model, make_optimizer(1e-6), loss=loss, microbatch=T + 1))
  state: Any = replicate(init_state(params, make_optimizer(1e-6)))
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
  state: Any = replicate(init_state(params, make_optimizer(1e-6)))
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
    state: Any = replicate(LearnerState(params, optax.EmptyState(), jnp.int32(10)))
    hyperparams = HYPERPARAMS._replace(learning_rate=1.0, max_grad_norm=float(limit))
    state, _ = gradient_update(4, 2)(state, shared(batch, 2), hyperparams)
    step = jax.tree.map(lambda old, new: old - new, params, first_replica(state).params)
    assert_close(step, jax.tree.map(lambda g, s=scale: s * g, grads))
