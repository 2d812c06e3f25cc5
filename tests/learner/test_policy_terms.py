"""What the policy says of stored actions: hybrid actions, masks, and slots that do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.config import Exploration
from sfjax.learner.policy_terms import policy_terms
from sfjax.specs import ActionSpec

# A choice of 3 and a box of 1: logits (log 2, log 1, log 1), so p = (½, ¼, ¼); mean 1, log std 0.
HYBRID = ActionSpec((3,), (-9.0,), (9.0,))
PARAMS = jnp.array([[[np.log(2.0), 0.0, 0.0, 1.0, 0.0]]])
BEHAVIOUR = jnp.zeros((1, 1, 5))
ACTIONS = jnp.array([[[2.0, 3.0]]])
VALID = jnp.ones((1, 1), bool)
GAUSSIAN_ENTROPY = 0.5 * (1 + np.log(2 * np.pi))


def test_hybrid_actions_by_hand():
  """Catches one part of the action that is left out of a term, and KL the other way round."""
  terms = policy_terms(
    HYBRID,
    PARAMS,
    ACTIONS,
    VALID,
    behaviour_params=BEHAVIOUR,
    exploration=Exploration.SYMMETRIC_KL,
  )
  # log ¼ for the choice; the box is 2 deviations off.
  expected = np.log(0.25) - 0.5 * np.log(2 * np.pi) - 2
  np.testing.assert_allclose(terms.log_prob_tm1, [[expected]], rtol=1e-5)
  entropy = 1.5 * np.log(2.0)
  np.testing.assert_allclose(terms.entropy_tm1, [[entropy + GAUSSIAN_ENTROPY]], rtol=1e-5)
  assert terms.exploration_tm1 is not None and terms.kl_tm1 is not None
  # ½ Σ (p - ⅓) (log p - log ⅓), and minus the Gaussian's entropy.
  p = np.array([0.5, 0.25, 0.25])
  divergence = 0.5 * np.sum((p - 1 / 3) * np.log(3 * p))
  np.testing.assert_allclose(terms.exploration_tm1, [[divergence - GAUSSIAN_ENTROPY]], rtol=1e-5)
  # Σ p log 3p, and half the squared distance of the means in deviations.
  np.testing.assert_allclose(terms.kl_tm1, [[np.sum(p * np.log(3 * p)) + 0.5]], rtol=1e-5)


def test_what_is_not_asked_for_is_not_computed():
  """Catches an entropy bonus that is counted as another loss, and a KL to nothing."""
  terms = policy_terms(HYBRID, PARAMS, ACTIONS, VALID)
  assert terms.exploration_tm1 is None and terms.kl_tm1 is None


def test_the_kl_penalty_pulls_back_to_the_policy_that_acted():
  """Catches a gradient through the stored side alone, a lost sign, and the reverse KL's slope."""

  def kl(params):
    terms = policy_terms(HYBRID, params, ACTIONS, VALID, behaviour_params=BEHAVIOUR)
    assert terms.kl_tm1 is not None
    return jnp.sum(terms.kl_tm1)

  value, grad = jax.value_and_grad(kl)(PARAMS)
  # By a logit: p (log(p / q) - KL of the choice). By the mean: (mean - other) / variance.
  p = np.array([0.5, 0.25, 0.25])
  of_choice = np.sum(p * np.log(3 * p))
  np.testing.assert_allclose(grad[0, 0, :3], p * (np.log(3 * p) - of_choice), rtol=1e-4)
  np.testing.assert_allclose(grad[0, 0, 3:], [1.0, 0.0], atol=1e-6)
  assert kl(PARAMS - 0.1 * grad) < value


@pytest.mark.parametrize('exploration', list(Exploration))
@pytest.mark.parametrize('poison', (np.nan, np.inf, -np.inf, 1e30))
def test_poison_where_nothing_counts_reaches_no_gradient(exploration, poison):
  """Catches a stored number that gets into the arithmetic first: masked later, it is 0 · NaN."""
  valid = jnp.array([[True, False]])
  mask = jnp.array([[[True, True, False], [False, False, False]]])
  params = jnp.concatenate([PARAMS, PARAMS], 1)

  def total(params, other):
    terms = policy_terms(
      HYBRID,
      params,
      jnp.concatenate([ACTIONS * jnp.array([[[0, 1]]]), other[..., :2]], 1),
      valid,
      mask=mask,
      behaviour_params=jnp.concatenate([BEHAVIOUR, other], 1),
      exploration=exploration,
    )
    return jnp.sum(jnp.stack([jnp.where(valid, x, 0.0) for x in terms if x is not None]))

  clean = jax.grad(total)(params, jnp.zeros((1, 1, 5)))
  grad = jax.grad(total)(params, jnp.full((1, 1, 5), poison))
  assert np.isfinite(clean).all() and np.abs(clean[0, 0]).max() > 0
  assert np.asarray(grad).tobytes() == np.asarray(clean).tobytes()
