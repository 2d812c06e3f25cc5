"""Masked sums and moments over the samples of all devices: exact where devices hold different
numbers of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree


def psum(tree: Any, axis_name: str | None) -> Any:
  """Adds every float32 array of `tree` over the devices of a pmap axis; None: one device.

  As one array: what a sum over devices costs is meeting, not adding.
  """
  if axis_name is None:
    return tree
  flat, unravel = ravel_pytree(tree)
  return unravel(jax.lax.psum(flat, axis_name))


def masked_sum(x: float | jax.Array, mask: jax.Array) -> jax.Array:
  """Sums x [...] where mask [...] is true; numbers elsewhere, NaN too, do not matter."""
  return jnp.sum(jnp.where(mask, x, 0.0))


def masked_mean(tree: Any, mask: jax.Array, *, axis_name: str | None = None) -> Any:
  """Averages every array of `tree` over the true places of a mask, on all devices at once.

  Sums and counts are added over devices before dividing: devices hold different
  numbers of valid samples, so a mean of means would be wrong.

  Args:
    tree: arrays of the mask's shape.
    mask: bool [...] which entries count.
    axis_name: pmap axis whose devices share the batch; None for one device.

  Returns:
    The tree with a scalar for each array; 0 where no entry counts.
  """
  sums = jax.tree.map(lambda x: masked_sum(x, mask), tree)
  sums, count = psum((sums, masked_sum(1.0, mask)), axis_name)
  return jax.tree.map(lambda total: total / jnp.maximum(count, 1.0), sums)


def masked_moments(
  tree: dict[str, jax.Array], mask: jax.Array, *, axis_name: str | None = None
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Mean and standard deviation, in two passes: E[x²] - E[x]² cancels in float32."""
  tree = jax.lax.stop_gradient(tree)
  means = masked_mean(tree, mask, axis_name=axis_name)
  squares = jax.tree.map(lambda x, mean: jnp.square(x - mean), tree, means)
  variances = masked_mean(squares, mask, axis_name=axis_name)
  return {name: (means[name], jnp.sqrt(variances[name])) for name in tree}
