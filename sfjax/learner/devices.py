"""The learner's devices: programs replicated by pmap, state copied to each, batches split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfjax.learner.minibatches import Prepare, ShuffledUpdate
from sfjax.learner.update import AXIS


def replicate(tree: Any) -> Any:
  """Copies a tree of arrays to every local device, under a new leading axis."""
  copies = jnp.arange(jax.local_device_count())
  # Under another axis name the copies would have another sharding, and `update` compile twice.
  return jax.pmap(lambda tree, _: tree, axis_name=AXIS, in_axes=(None, 0))(tree, copies)


def first_replica(tree: Any) -> Any:
  """Returns the first device's copy of a replicated tree on the host, without the leading axis.

  The arrays may be views of device memory: use them before the tree is donated.
  """
  return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], tree)


def pmap_shuffled_update(update: ShuffledUpdate) -> ShuffledUpdate:
  """Runs an update on every local device, each on its share of the batch; donates the state.

  All devices take the same hyperparameters and `Shuffle`.
  """
  return jax.pmap(update, axis_name=AXIS, in_axes=(0, 0, None, None), donate_argnums=0)


def pmap_prepare(prepare: Prepare) -> Prepare:
  """Runs `prepare` on every local device, each on its share of the batch, which stays there."""
  return jax.pmap(prepare, axis_name=AXIS, in_axes=(0, 0, None))
