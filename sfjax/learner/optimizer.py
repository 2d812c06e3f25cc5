"""The optimizer: Adam behind a global-norm clip, its coefficients traced."""

import jax
import jax.numpy as jnp
import optax


def make_optimizer(adam_eps: float) -> optax.GradientTransformation:
  """Returns Adam without a learning rate; `descend` applies that."""
  return optax.scale_by_adam(eps=adam_eps)


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
