"""The optimizer: what makes a step of a gradient, behind a global-norm clip; coefficients that
population training may change are traced."""

import jax
import jax.numpy as jnp
import optax


def make_optimizer(
  kind: str,
  *,
  beta1: float = 0.9,
  beta2: float = 0.999,
  eps: float = 1e-6,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Returns an optimizer without a learning rate; `descend` applies that, to the decay too.

  Its `update` needs the parameters. Only arrays of two axes or more decay, the kernels: biases and
  log standard deviations do not.

  Args:
    kind: 'adam', of Kingma & Ba (2014, arXiv:1412.6980); 'adamw', with "Decoupled Weight Decay
      Regularization" (Loshchilov & Hutter 2017, arXiv:1711.05101); or 'lamb', which scales AdamW's
      step of every array to the norm of the array, of "Large Batch Optimization for Deep Learning"
      (You et al. 2019, arXiv:1904.00962). Differs from the paper, as Optax does: norms and ratios
      have no limits; where a norm is 0 the ratio is 1.
    beta1: decay of the mean of gradients, per update.
    beta2: decay of the mean of their squares, per update.
    eps: added to the root of the mean square.
    weight_decay: of adamw and lamb, per update and learning rate.

  Raises:
    ValueError: there is no such optimizer, or adam is to decay weights.
  """
  adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps)
  if kind == 'adam':
    if weight_decay:
      raise ValueError(f'adam does not decay weights: weight_decay {weight_decay}; use adamw')
    return adam
  decay = optax.add_decayed_weights(weight_decay, mask=_decays)
  if kind == 'adamw':
    return optax.chain(adam, decay)
  if kind == 'lamb':
    return optax.chain(adam, decay, optax.scale_by_trust_ratio())
  raise ValueError(f'there is no optimizer {kind!r}; use adam, adamw or lamb')


def _decays(params: optax.Params) -> optax.Params:
  return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params)


def global_norm(tree: optax.Updates) -> jax.Array:
  """The Euclidean norm of all numbers of a tree."""
  return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def clip_by_global_norm(
  grads: optax.Updates, max_norm: jax.Array | float
) -> tuple[optax.Updates, jax.Array]:
  """Scales gradients to a global norm of at most `max_norm` (0: no limit).

  Returns:
    The gradients and their norm before scaling.
  """
  norm = global_norm(grads)
  limit = jnp.where(max_norm > 0, max_norm, jnp.inf)
  scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
  return jax.tree.map(lambda g: g * scale, grads), norm


def descend(params: optax.Params, updates: optax.Updates, learning_rate: jax.Array) -> optax.Params:
  """Takes a step of size `learning_rate` against `updates`."""
  return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
