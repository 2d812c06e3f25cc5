"""Distributions over actions, against arithmetic by hand, enumeration and integration.

The oracles are NumPy in float64 and share nothing with sfjax but the layout of the parameters.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from sfjax.models import distributions
from sfjax.specs import ActionSpec, continuous, discrete

SPACES = {
  'equal': discrete(3, 3),
  'unequal': discrete(3, 1, 4, 2),
  'box': continuous([-1.0, -np.inf], [1.0, np.inf]),
  'hybrid': ActionSpec((3, 2), (-2.0, 1.0), (2.0, 5.0), squash=True),
}
ALL = pytest.mark.parametrize('spec', SPACES.values(), ids=SPACES)
CATEGORICAL = pytest.mark.parametrize('name', ['equal', 'unequal'])
f32 = partial(np.array, dtype=np.float32)

LEADING = (2, 3)
N = 24  # Rows where gradients are taken: one program for all tests.
DRAWS = 10_000  # Likewise where actions are drawn.

# Probabilities 1/2, 1/4, 1/8, 1/8, as logits that are not normalised.
PROBABILITIES = np.array([0.5, 0.25, 0.125, 0.125])
LOGITS = jnp.asarray(np.log(PROBABILITIES) + 3.0, jnp.float32)


def functions_of_params(spec: ActionSpec, params, actions, other, mask):
  """Everything of the parameters that a loss may descend on, [5, ...]."""
  return jnp.stack(
    [
      distributions.log_prob(spec, params, actions, mask),
      distributions.entropy(spec, params, mask),
      distributions.kl(spec, params, other, mask),
      distributions.kl(spec, other, params, mask),
      distributions.symmetric_kl_to_uniform(spec, params, mask),
    ]
  )


FUNCTIONS = ('log_prob', 'entropy', 'kl from', 'kl to', 'symmetric')


@cache
def evaluation(spec: ActionSpec):
  def gradients(params, *rest):
    totals = lambda p: functions_of_params(spec, p, *rest).reshape(5, -1).sum(axis=1)  # noqa: E731
    return functions_of_params(spec, params, *rest), jax.jacrev(totals)(params)

  return jax.jit(gradients)


def evaluate(spec: ActionSpec, params, actions, other, mask=None):
  """Values [N] and gradients [N, P] of the functions above, by name."""
  values, grads = evaluation(spec)(params, actions, other, mask)
  rows = zip(np.asarray(values), np.asarray(grads), strict=True)
  return dict(zip(FUNCTIONS, rows, strict=True))


@cache
def jitted(name: str, spec: ActionSpec):
  return jax.jit(partial(getattr(distributions, name), spec))


def random_params(spec: ActionSpec, seed: int, *leading: int, scale: float = 1.0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return (scale * rng.normal(size=(*leading, spec.num_params))).astype(np.float32)


def random_mask(spec: ActionSpec, seed: int, *leading: int) -> np.ndarray:
  """A mask that allows at least one alternative of every choice."""
  rng = np.random.default_rng(seed)
  mask = rng.random((*leading, spec.num_logits)) < 0.5
  for start, size in zip(offsets(spec), spec.choices, strict=True):
    always = start + rng.integers(size, size=leading)
    np.put_along_axis(mask, np.asarray(always)[..., None], True, axis=-1)
  return mask


def random_actions(spec: ActionSpec, seed: int, mask: np.ndarray) -> np.ndarray:
  """Actions [N, A] of which `mask` [N, L] allows every choice."""
  rng = np.random.default_rng(seed)
  actions = rng.normal(size=(N, spec.size)).astype(spec.stored.dtype)
  for i, (start, n) in enumerate(zip(offsets(spec), spec.choices, strict=True)):
    actions[:, i] = [rng.choice(np.flatnonzero(row)) for row in mask[:, start : start + n]]
  return actions


def offsets(spec: ActionSpec) -> list[int]:
  return [sum(spec.choices[:i]) for i in range(spec.num_choices)]


def probabilities(
  spec: ActionSpec, params: np.ndarray, mask: np.ndarray | None = None
) -> list[np.ndarray]:
  """Of one parameter vector: the probabilities of each choice, forbidden ones 0."""
  out = []
  for start, size in zip(offsets(spec), spec.choices, strict=True):
    p = special.softmax(params[start : start + size].astype(np.float64))
    p = p if mask is None else p * mask[start : start + size]
    out.append(p / p.sum())
  return out


def gaussian(spec: ActionSpec, params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean and deviation of the box before squashing."""
  mean, raw = np.split(params[spec.num_logits :].astype(np.float64), 2)
  limit = np.log(1e4)
  return mean, np.exp(limit * np.tanh(raw / limit))


def half_widths(spec: ActionSpec) -> np.ndarray:
  return (np.array(spec.high) - np.array(spec.low)) / 2


def log_prob_oracle(spec, params, action, mask=None) -> float:
  """By scipy; the change of variables with tanh itself."""
  parts = probabilities(spec, params, mask)
  out = sum(float(np.log(p[int(a)])) for p, a in zip(parts, action, strict=False))
  x = action[spec.num_choices :].astype(np.float64)
  out += float(stats.norm.logpdf(x, *gaussian(spec, params)).sum())
  if spec.squash:
    out -= float(np.log(half_widths(spec) * (1 - np.tanh(x) ** 2)).sum())
  return out


def test_log_prob_is_that_of_the_action_under_normalised_logits():
  """Catches logits that are taken for log-probabilities, and a wrong element or axis."""
  # log 1/2 = -0.693147, log 1/4 = -1.386294, log 1/8 = -2.079442.
  expected = [-0.693147, -1.386294, -2.079442, -2.079442]
  logits = jnp.broadcast_to(LOGITS, (3, 4, 4))
  actions = jnp.broadcast_to(jnp.arange(4), (3, 4))[..., None]
  out = distributions.log_prob(discrete(4), logits, actions)
  np.testing.assert_allclose(out, np.broadcast_to(expected, (3, 4)), rtol=1e-5)


def test_entropy_by_hand():
  """Catches a wrong sign, bits for nats, and a sum over the wrong axis."""
  # 1/2 · log 2 + 1/4 · log 4 + 2 · 1/8 · log 8 = (1/2 + 1/2 + 3/4) log 2 = 1.75 · 0.693147.
  logits = jnp.stack([LOGITS, jnp.zeros(4)])[None]
  # Uniform: log 4 = 1.386294.
  entropy = distributions.entropy(discrete(4), logits)
  np.testing.assert_allclose(entropy, [[1.213008, 1.386294]], rtol=1e-5)


def test_divergences_by_hand():
  """Catches p and q exchanged, one direction for both, and a missing half."""
  # KL(p‖u) = log 4 - 1.213008 = 0.173287 = log 2 / 4.
  kl = partial(distributions.kl, discrete(4))
  assert float(kl(LOGITS, jnp.zeros(4))) == pytest.approx(0.173287, rel=1e-4)
  # KL(u‖p) = -log 4 - 1/4 log(1/2 · 1/4 · 1/8 · 1/8) = -2 log 2 + 9/4 log 2 = log 2 / 4 too.
  assert float(kl(jnp.zeros(4), LOGITS)) == pytest.approx(0.173287, rel=1e-4)
  # Two alternatives, 0.9 and 0.1: KL(p‖u) = 0.9 log 1.8 + 0.1 log 0.2 = 0.368064 and
  # KL(u‖p) = -1/2 log(4 · 0.09) = 0.510826; half their sum is 0.439445.
  p = jnp.log(jnp.array([0.9, 0.1]))
  kl = partial(distributions.kl, discrete(2))
  assert float(kl(p, jnp.zeros(2))) == pytest.approx(0.368064, rel=1e-4)
  assert float(kl(jnp.zeros(2), p)) == pytest.approx(0.510826, rel=1e-4)
  symmetric = distributions.symmetric_kl_to_uniform(discrete(2), p)
  assert float(symmetric) == pytest.approx(0.439445, rel=1e-4)


def test_gaussian_by_hand():
  """Catches a variance taken for a deviation, and a constant left out."""
  box = continuous([-1.0], [1.0])
  unit = jnp.zeros(2)
  # log N(1; 0, 1) = -1/2 - 1/2 log 2π = -1.418939; its entropy is 1/2 (1 + log 2π) = 1.418939.
  assert float(distributions.log_prob(box, unit, jnp.ones(1))) == pytest.approx(-1.418939)
  assert float(distributions.entropy(box, unit)) == pytest.approx(1.418939)
  # KL(N(1, 1) ‖ N(0, 1)) = 1/2. No uniform to compare with: minus the entropy.
  assert float(distributions.kl(box, jnp.array([1.0, 0.0]), unit)) == pytest.approx(0.5)
  assert float(distributions.symmetric_kl_to_uniform(box, unit)) == pytest.approx(-1.418939)


@ALL
@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
def test_log_prob_agrees_with_scipy(spec: ActionSpec, masked: bool):
  """Catches columns or parameters of one part read for another, and a mask on the wrong one."""
  params, mask = random_params(spec, 0, N), random_mask(spec, 2, N)
  actions = random_actions(spec, 1, mask)
  out, _ = evaluate(spec, params, actions, params, mask if masked else None)['log_prob']
  for at in range(N):
    expected = log_prob_oracle(spec, params[at], actions[at], mask[at] if masked else None)
    assert out[at] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@CATEGORICAL
@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
def test_products_agree_with_the_sum_over_all_joint_actions(name: str, masked: bool):
  """Catches probabilities that do not sum to 1, and entropy or divergence of one part only."""
  spec = SPACES[name]
  p, q = random_params(spec, 0), random_params(spec, 1)
  mask = random_mask(spec, 2) if masked else None
  joint = np.array(list(itertools.product(*map(range, spec.choices))), np.int32)
  rows = np.resize(joint, (N, spec.num_choices))  # Some again, to share a program.
  many = lambda x: None if x is None else np.broadcast_to(x, (N, len(x)))  # noqa: E731
  out = evaluate(spec, many(p), rows, many(q), many(mask))
  log_p = out['log_prob'][0][: len(joint)].astype(np.float64)
  log_q, _ = evaluate(spec, many(q), rows, many(q), many(mask))['log_prob']
  prob = np.exp(log_p)
  assert prob.sum() == pytest.approx(1.0, rel=1e-5)
  some = prob > 0
  log_p, log_q, prob = log_p[some], log_q[: len(joint)][some], prob[some]
  assert out['entropy'][0][0] == pytest.approx(-(prob * log_p).sum(), rel=1e-4, abs=1e-6)
  assert out['kl from'][0][0] == pytest.approx((prob * (log_p - log_q)).sum(), rel=1e-4, abs=1e-6)
  reverse = (np.exp(log_q) * (log_q - log_p)).sum()
  assert out['kl to'][0][0] == pytest.approx(reverse, rel=1e-4, abs=1e-6)
  # Uniform over what is allowed, in both directions.
  log_u = -np.log(some.sum())
  symmetric = 0.5 * (prob * (log_p - log_u)).sum() + 0.5 * (log_u - log_p).mean()
  assert out['symmetric'][0][0] == pytest.approx(symmetric, rel=1e-4, abs=1e-6)


@ALL
def test_entropy_and_kl_agree_with_samples(spec: ActionSpec):
  """Catches an entropy or divergence that is not that of what `sample` and `log_prob` say."""
  n = DRAWS
  p, q = random_params(spec, 3, scale=0.5), random_params(spec, 4, scale=0.5)
  many = partial(np.broadcast_to, shape=(n, spec.num_params))
  actions = jitted('sample', spec)(jax.random.key(5), many(p))
  log_p = np.asarray(jitted('log_prob', spec)(many(p), actions))
  log_ratio = log_p - np.asarray(jitted('log_prob', spec)(many(q), actions))
  # Five standard errors of a mean.
  entropy, kl = (float(x) for x in (jitted('entropy', spec)(p), jitted('kl', spec)(p, q)))
  tolerance = 5 * float(log_p.std()) / n**0.5 + 1e-5
  assert entropy == pytest.approx(-float(log_p.mean()), abs=tolerance)
  tolerance = 5 * float(log_ratio.std()) / n**0.5 + 1e-5
  assert kl == pytest.approx(float(log_ratio.mean()), abs=tolerance)


@ALL
def test_equal_distributions_do_not_diverge(spec: ActionSpec):
  """Catches a divergence, or its gradient, that moves a policy that stood still."""
  params = random_params(spec, 6, N, scale=3.0)
  actions = np.zeros((N, spec.size), spec.stored.dtype)
  out = evaluate(spec, params, actions, params)
  for function in ('kl from', 'kl to'):
    for x in out[function]:
      np.testing.assert_allclose(x, 0.0, atol=2e-6)


def squashed_grid(spec: ActionSpec) -> tuple[np.ndarray, np.ndarray]:
  """Points of the first dimension's interval, and the stored numbers that mean them."""
  fractions = (np.arange(200_000) + 0.5) / 200_000
  points = spec.low[0] + fractions * (spec.high[0] - spec.low[0])
  return points, np.arctanh(2 * fractions - 1)


@pytest.mark.parametrize('mean, log_std', [(0.0, -0.1), (-1.0, -1.0), (0.5, 0.5)])
def test_a_squashed_density_is_one_over_the_interval(mean: float, log_std: float):
  """Catches a correction that is halved, has the wrong sign, or forgets the bounds."""
  spec = continuous([-2.0], [3.0], squash=True)
  points, stored = squashed_grid(spec)
  params = np.broadcast_to(f32([mean, log_std]), (len(points), 2))
  log_p = jitted('log_prob', spec)(params, f32(stored)[:, None])
  log_p = np.asarray(log_p, np.float64)
  density, step = np.exp(log_p), points[1] - points[0]
  assert density.sum() * step == pytest.approx(1.0, abs=2e-3)
  entropy = float(jitted('entropy', spec)(params[0]))
  assert entropy == pytest.approx(-(density * log_p).sum() * step, abs=5e-3)
  # Uniform density 1/5 over an interval of length 5.
  symmetric = 0.5 * (density * (log_p + np.log(5))).sum() * step
  symmetric += 0.5 * (-np.log(5) - log_p).mean()
  out = float(jitted('symmetric_kl_to_uniform', spec)(params[0]))
  assert out == pytest.approx(symmetric, abs=5e-3)


def test_the_quadrature_of_the_squashed_entropy_is_as_exact_as_documented():
  """Catches nodes for another weight function, and fewer of them."""
  spec = continuous([-1.0], [1.0], squash=True)
  z = np.linspace(-9, 9, 4001)
  for std, tolerance in ((0.1, 1e-4), (1.0, 1e-4), (2.0, 4e-3), (3.0, 3e-2), (10.0, 0.4)):
    for mean in (0.0, 0.7, 5.0):
      x = mean + std * z
      slope = 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
      expected = 0.5 * np.log(2 * np.pi * np.e) + np.log(std)
      expected += np.trapezoid(slope * stats.norm.pdf(z), z)
      limit = np.log(1e4)
      raw = limit * np.arctanh(np.log(std) / limit)
      out = jitted('entropy', spec)(f32([mean, raw]))
      assert float(out) == pytest.approx(expected, abs=tolerance)


def test_a_squashed_policy_that_explores_more_has_the_larger_entropy():
  """Catches the correction with the wrong sign: it would reward sticking to the bounds."""
  spec = continuous([-1.0], [1.0], squash=True)
  grad = jax.jit(jax.grad(partial(distributions.entropy, spec)))
  for mean in (0.5, 3.0, 30.0):
    for log_std in (-3.0, 0.0, 3.0):
      assert grad(jnp.array([mean, log_std]))[0] < 0
      assert grad(jnp.array([-mean, log_std]))[0] > 0
  assert grad(jnp.array([0.0, -1.0]))[1] > 0 > grad(jnp.array([0.0, 1.0]))[1]


@pytest.mark.parametrize('name', ['unequal', 'hybrid'])
def test_a_masked_space_is_the_smaller_space(name: str):
  """Catches forbidden logits that still move, or still count in a sum or in the uniform."""
  spec = SPACES[name]
  mask, params, other = random_mask(spec, 7), random_params(spec, 8, N), random_params(spec, 9, N)
  masks = np.tile(mask, (N, 1))
  assert not mask.all()
  kept = [np.flatnonzero(mask[i : i + n]) for i, n in zip(offsets(spec), spec.choices, strict=True)]
  small = ActionSpec(tuple(map(len, kept)), spec.low, spec.high, spec.squash)
  actions = random_actions(spec, 10, masks)
  small_actions = actions.copy()
  for i, allowed in enumerate(kept):
    small_actions[:, i] = np.searchsorted(allowed, actions[:, i])
  columns = np.append(mask, np.ones(2 * spec.num_dims, bool))
  out = evaluate(spec, params, actions, other, masks)
  expected = evaluate(small, params[:, columns], small_actions, other[:, columns])
  for function, (value, grad) in out.items():
    np.testing.assert_allclose(value, expected[function][0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(grad[:, columns], expected[function][1], rtol=1e-4, atol=2e-6)
    assert np.all(grad[:, ~columns] == 0), function


@pytest.mark.parametrize('name', ['equal', 'hybrid'])
def test_forbidden_alternatives_are_never_taken(name: str):
  """Catches a mask that only discourages, and one applied to the wrong row of a batch."""
  spec, n = SPACES[name], DRAWS
  params = random_params(spec, 11, n)
  mask = random_mask(spec, 12, n)
  params[:, : spec.num_logits][~mask] += 50.0  # What is forbidden is what the policy wants most.
  taken = [jitted('sample', spec)(jax.random.key(13), params, mask)]
  taken.append(jitted('mode', spec)(params, mask))
  for actions in taken:
    for i, start in enumerate(offsets(spec)):
      columns = start + np.asarray(actions[:, i], np.int64)
      assert np.take_along_axis(mask, columns[:, None], axis=1).all()
  allowed = np.where(mask, params[:, : spec.num_logits], -np.inf)
  assert taken[0].shape == (n, spec.size) and taken[0].dtype == spec.stored.dtype
  for i, start in enumerate(offsets(spec)):
    best = allowed[:, start : start + spec.choices[i]].argmax(axis=1)
    np.testing.assert_array_equal(taken[1][:, i], best)


def test_probability_of_the_forbidden_is_zero():
  """Catches a penalty small enough to leave a probability, and one so large that it is NaN."""
  logits, mask = jnp.array([1e4, 0.0, -1e4]), jnp.array([False, True, True])
  log_prob = partial(distributions.log_prob, discrete(3), logits, mask=mask)
  assert float(jnp.exp(log_prob(jnp.array([0])))) == 0
  assert np.isfinite(log_prob(jnp.array([0])))
  assert float(log_prob(jnp.array([1]))) == 0
  # Two parts that both took what is forbidden.
  log_prob = distributions.log_prob(
    discrete(3, 3), jnp.tile(logits, 2), jnp.array([0, 0]), jnp.tile(mask, 2)
  )
  assert np.isfinite(log_prob)


@CATEGORICAL
def test_nothing_allowed_is_everything_uniformly(name: str):
  """Catches NaN from a sum over nothing, and padding of a shorter choice that becomes likely."""
  spec = SPACES[name]
  params, n = random_params(spec, 14, scale=100.0), DRAWS
  mask = np.zeros(spec.num_logits, bool)
  log_size = np.log(spec.choices).sum()
  actions = jitted('sample', spec)(
    jax.random.key(15), np.tile(params, (n, 1)), np.tile(mask, (n, 1))
  )
  for i, size in enumerate(spec.choices):
    frequencies = np.bincount(actions[:, i], minlength=size) / n
    # Standard deviation of a frequency: at most sqrt(1/4 / 10,000) = 0.005; five of them.
    np.testing.assert_allclose(frequencies, 1 / size, atol=0.025)
  many = partial(np.broadcast_to, shape=(N, spec.num_logits))
  out = evaluate(spec, many(params), actions[:N], many(-params), many(mask))
  np.testing.assert_allclose(out['log_prob'][0], -log_size, rtol=1e-5)
  np.testing.assert_allclose(out['entropy'][0], log_size, rtol=1e-5)
  for function in ('kl from', 'kl to', 'symmetric'):
    np.testing.assert_allclose(out[function][0], 0.0, atol=1e-6)
  for function, (_, grad) in out.items():
    assert np.all(grad == 0), function
  # One choice without anything allowed changes nothing about the others.
  if spec.num_choices > 1:
    mask[spec.choices[0] :] = True
    rest = discrete(*spec.choices[1:])
    expected = distributions.entropy(rest, jnp.asarray(params[spec.choices[0] :]))
    expected = float(expected) + np.log(spec.choices[0])
    assert float(jitted('entropy', spec)(params, mask)) == pytest.approx(expected, rel=1e-4)


@ALL
@pytest.mark.parametrize('size', [1.0, 1e4])
def test_extreme_parameters_stay_finite(spec: ActionSpec, size: float):
  """Catches 0 · log 0, an exponential that overflows and an inverse of tanh, also in gradients."""
  rng = np.random.default_rng(16)
  signs = rng.choice([-size, 0.0, size], size=(3, N, spec.num_params)).astype(np.float32)
  masks = rng.random((N, spec.num_logits)) < 0.3
  many = np.resize(signs[2], (DRAWS, spec.num_params))
  actions = np.array(jitted('sample', spec)(jax.random.key(17), many))
  assert np.isfinite(actions).all()
  actions = actions[:N]
  if spec.num_dims:
    actions[:, spec.num_choices :] *= size
  for mask in (None, masks):
    out = evaluate(spec, signs[0], actions, signs[1], mask)
    for function, both in out.items():
      assert all(np.isfinite(x).all() for x in both), function


def test_deviations_are_bounded_and_can_return():
  """Catches a missing bound, and a hard one that keeps what crosses it for ever."""
  spec = continuous([-1.0], [1.0])
  entropy = jax.jit(jax.value_and_grad(partial(distributions.entropy, spec)))
  log_stds = [float(entropy(jnp.array([0.0, raw]))[0]) - 1.418939 for raw in (-1e4, 0.1, 1e4)]
  # log 1e4 = 9.210340; 0.1 is not bent by more than 0.1³ / (3 · 9.21²) = 4e-6.
  np.testing.assert_allclose(log_stds, [-9.210340, 0.1, 9.210340], atol=2e-5)
  for raw in (-20.0, -9.5, 0.0, 9.5, 20.0):
    assert float(entropy(jnp.array([0.0, raw]))[1][1]) > 0.01


def test_sampling_frequencies_are_the_probabilities():
  """Catches noise on the wrong scale or of the wrong kind, and one noise for two choices."""
  n, spec = 40_000, discrete(4, 4)
  keys = jax.random.split(jax.random.key(0), n)
  draw = jax.jit(jax.vmap(partial(distributions.sample, spec), in_axes=(0, None)))
  actions = np.asarray(draw(keys, jnp.tile(LOGITS, 2)))
  assert actions.dtype == np.int32 and actions.shape == (n, 2)
  counts = np.bincount(actions[:, 0] * 4 + actions[:, 1], minlength=16).reshape(4, 4)
  # Standard deviation of a frequency: at most sqrt(1/4 / 40,000) = 0.0025; four of them.
  np.testing.assert_allclose(counts / n, np.outer(PROBABILITIES, PROBABILITIES), atol=0.01)


def test_sampling_moments_of_a_box():
  """Catches a variance for a deviation, one noise for two dimensions, and noise shared between
  choices and box."""
  n, spec = 40_000, ActionSpec((2,), (-1.0, -1.0), (1.0, 1.0))
  params = f32([0.0, 0.0, 1.0, -3.0, np.log(0.5), np.log(2.0)])
  keys = jax.random.split(jax.random.key(1), n)
  draw = jax.jit(jax.vmap(partial(distributions.sample, spec), in_axes=(0, None)))
  actions = np.asarray(draw(keys, params))
  assert actions.dtype == np.float32 and set(actions[:, 0]) == {0.0, 1.0}
  # Standard errors of the means 2 / 200 = 0.01 at most, of the deviations less.
  np.testing.assert_allclose(actions[:, 1:].mean(axis=0), [1.0, -3.0], atol=0.04)
  np.testing.assert_allclose(actions[:, 1:].std(axis=0), [0.5, 2.0], rtol=0.02)
  np.testing.assert_allclose(np.corrcoef(actions.T), np.eye(3), atol=0.025)
  assert stats.kstest((actions[:, 1] - 1.0) / 0.5, 'norm').pvalue > 1e-3


@ALL
def test_mode_is_the_likeliest_choice_and_the_mean(spec: ActionSpec):
  """Catches a sampled action, the smallest, and an argmax that breaks for more than one row."""
  params = random_params(spec, 18, *LEADING)
  out = np.asarray(jitted('mode', spec)(params))
  assert out.shape == (*LEADING, spec.size) and out.dtype == spec.stored.dtype
  for at in np.ndindex(LEADING):
    best = [p.argmax() for p in probabilities(spec, params[at])]
    np.testing.assert_allclose(out[at], [*best, *gaussian(spec, params[at])[0]], rtol=1e-6)


def test_a_batch_is_its_rows():
  """Catches a sum or a normalisation that reaches over to the neighbours, and a fixed rank."""
  spec, leading = SPACES['hybrid'], (2, N // 2)
  params, other = random_params(spec, 19, N), random_params(spec, 20, N)
  mask = random_mask(spec, 21, N)
  arguments = params, random_actions(spec, 22, mask), other, mask
  values = np.stack([value for value, _ in evaluate(spec, *arguments).values()])
  one = partial(functions_of_params, spec)
  rows = jax.jit(jax.vmap(one, out_axes=1))(*arguments)
  np.testing.assert_allclose(rows, values, rtol=1e-5, atol=1e-5)
  folded = jax.jit(one)(*(x.reshape(*leading, -1) for x in arguments))
  np.testing.assert_allclose(folded.reshape(5, N), values, rtol=1e-5, atol=1e-5)


def test_half_precision_parameters_are_read_in_float32():
  """Catches log-probabilities with three digits where the network computes in bfloat16."""
  params = LOGITS.astype(jnp.bfloat16)
  out = distributions.log_prob(discrete(4), params, jnp.array([0]))
  assert out.dtype == jnp.float32
  exact = distributions.log_prob(discrete(4), params.astype(jnp.float32), jnp.array([0]))
  assert float(out) == float(exact)


def test_shapes_that_do_not_fit_are_refused():
  """Catches a batch of actions without their last axis, or a mask of another space."""
  params = jnp.zeros((3, 4))
  with pytest.raises(AssertionError):
    distributions.log_prob(discrete(4), params, jnp.zeros(3, jnp.int32))
  with pytest.raises(AssertionError):
    distributions.entropy(discrete(3), params)
  with pytest.raises(AssertionError):
    distributions.entropy(discrete(4), params, jnp.ones((3, 5), bool))
