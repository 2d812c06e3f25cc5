"""Optimizers against Optax with a learning rate inside, and against arithmetic by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sfjax.learner.optimizer import clip_by_global_norm, descend, global_norm, make_optimizer

DECAYS = {'kernel': True, 'recurrent_kernel': True, 'bias': False, 'log_std': False}


def make_params() -> Any:
  rng = np.random.default_rng(0)
  return {
    'kernel': jnp.asarray(rng.normal(size=(2, 2, 3, 4)), jnp.float32),
    'recurrent_kernel': jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
    'bias': jnp.zeros(4),
    'log_std': jnp.asarray([0.5, -1.0]),
  }


def make_grads(step: int) -> Any:
  rng = np.random.default_rng(100 + step)
  return jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape) * 3, jnp.float32), make_params()
  )


def train(optimizer: optax.GradientTransformation, rates: list[float]) -> Any:
  params = make_params()
  state = optimizer.init(params)

  @jax.jit
  def step(params, state, grads, rate):
    updates, state = optimizer.update(grads, state, params)
    return descend(params, updates, rate), state

  for i, rate in enumerate(rates):
    params, state = step(params, state, make_grads(i), rate)
  return params


def train_with_optax(make: Any, rates: list[float]) -> Any:
  params, boundaries = make_params(), jnp.asarray(rates)
  optimizer = make(lambda count: boundaries[count])
  state = optimizer.init(params)

  @jax.jit
  def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for i in range(len(rates)):
    params, state = step(params, state, make_grads(i))
  return params


BETAS: Any = {'b1': 0.8, 'b2': 0.95, 'eps': 1e-3}
REFERENCES = {
  'adam': lambda rate: optax.adam(rate, **BETAS),
  'adamw': lambda rate: optax.adamw(rate, **BETAS, weight_decay=0.3, mask=DECAYS),
  'lamb': lambda rate: optax.lamb(rate, **BETAS, weight_decay=0.3, mask=DECAYS),
}


@pytest.mark.parametrize('kind', REFERENCES)
def test_steps_are_those_of_optax(kind):
  """Catches coefficients exchanged or ignored, parts out of order, a decay that the learning rate
  does not scale, a bias that decays, and a step in the direction of the gradient."""
  options = {} if kind == 'adam' else {'weight_decay': 0.3}
  optimizer = make_optimizer(kind, beta1=0.8, beta2=0.95, eps=1e-3, **options)
  rates = [0.1, 0.02, 0.3, 0.05, 0.2]
  expected, params = train_with_optax(REFERENCES[kind], rates), train(optimizer, rates)
  for name in params:
    assert np.abs(np.asarray(params[name]) - make_params()[name]).max() > 1e-3
    np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_two_steps_of_adam_by_hand():
  """Catches a missing correction of the first means, and eps within the root."""
  optimizer = make_optimizer('adam', beta1=0.5, beta2=0.75, eps=1.0)
  params: Any = jnp.asarray([1.0])
  updates: Any
  state = optimizer.init(params)
  # m = 0.5 · 2 = 1, over 1 - 0.5: 2. v = 0.25 · 4 = 1, over 1 - 0.75: 4. 2 / (sqrt(4) + 1).
  updates, state = optimizer.update(jnp.asarray([2.0]), state, params)
  np.testing.assert_allclose(updates, [2 / 3], rtol=1e-6)
  after: Any = descend(params, updates, jnp.float32(0.3))
  np.testing.assert_allclose(after, [0.8], rtol=1e-6)
  # m = 0.5 - 3 = -2.5, over 0.75: -10/3. v = 0.75 + 9 = 9.75, over 1 - 0.5625: 22.285714.
  updates, _ = optimizer.update(jnp.asarray([-6.0]), state, params)
  np.testing.assert_allclose(updates, [-10 / 3 / (22.285714**0.5 + 1)], rtol=1e-6)


@pytest.mark.parametrize('rate', (0.1, 0.01))
def test_only_kernels_decay_in_proportion_to_the_rate(rate):
  """Catches a decay within the gradient, which Adam would divide away: without a gradient a kernel
  shrinks by rate · weight_decay, and nothing else moves."""
  optimizer = make_optimizer('adamw', weight_decay=0.5)
  params = make_params() | {'bias': jnp.ones(4)}
  updates, _ = optimizer.update(
    jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
  )
  after: Any = descend(params, updates, jnp.float32(rate))
  for name, decays in DECAYS.items():
    expected = params[name] * (1 - rate * 0.5) if decays else params[name]
    np.testing.assert_allclose(after[name], expected, rtol=1e-6, err_msg=name)


def test_a_step_of_lamb_is_as_long_as_the_array_it_changes():
  """Catches a ratio over all arrays at once, and one that leaves out the decay."""
  optimizer = make_optimizer('lamb', weight_decay=0.5)
  params, state = make_params(), optimizer.init(make_params())
  updates: Any = optimizer.update(make_grads(0), state, params)[0]
  for name, array in params.items():
    norm = np.linalg.norm(array) if name != 'bias' else 2.0  # The norm is 0: Adam's step, 4 of ±1.
    assert np.linalg.norm(updates[name]) == pytest.approx(float(norm), rel=1e-5), name


def test_impossible_optimizers_are_refused():
  with pytest.raises(ValueError, match=r'weight_decay 0\.1; use adamw'):
    make_optimizer('adam', weight_decay=0.1)
  with pytest.raises(ValueError, match="no optimizer 'sgd'; use adam, adamw or lamb"):
    make_optimizer('sgd')


@pytest.mark.parametrize(('limit', 'scale'), ((2.5, 0.5), (5.0, 1.0), (9.0, 1.0), (0.0, 1.0)))
def test_gradients_are_scaled_to_the_limit(limit, scale):
  """Catches a limit for each array, small gradients made larger, and 0 taken for a limit."""
  grads = {'a': jnp.asarray([3.0, 0.0]), 'b': jnp.asarray([[-4.0]])}
  clipped, norm = clip_by_global_norm(grads, limit)
  assert float(norm) == pytest.approx(5.0)
  assert float(global_norm(clipped)) == pytest.approx(5.0 * scale)
  jax.tree.map(lambda c, g: np.testing.assert_allclose(c, scale * g, rtol=1e-6), clipped, grads)


def test_gradients_of_zero_stay_zero():
  """Catches 0 / 0."""
  clipped, norm = clip_by_global_norm({'a': jnp.zeros(3)}, 1.0)
  assert float(norm) == 0.0 and not np.asarray(jax.tree.leaves(clipped)[0]).any()
