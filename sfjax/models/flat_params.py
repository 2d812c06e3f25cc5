"""Parameters as one run of bytes, for the parameter buffer."""

from typing import Any

import jax
import numpy as np

_ALIGNMENT = 64  # What XLA wants of host memory.


def _spans(template: Any) -> tuple[list[slice], int]:
  spans, offset = [], 0
  for leaf in jax.tree.leaves(template):
    nbytes = leaf.size * leaf.dtype.itemsize
    spans.append(slice(offset, offset + nbytes))
    offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
  return spans, offset


def flat_nbytes(template: Any) -> int:
  """Bytes of a tree like `template` (arrays or shapes with dtypes)."""
  return _spans(template)[1]


def flatten_params(params: Any) -> np.ndarray:
  """Copies a tree of arrays into [flat_nbytes] uint8."""
  spans, nbytes = _spans(params)
  flat = np.zeros(nbytes, np.uint8)
  for span, leaf in zip(spans, jax.tree.leaves(params), strict=True):
    flat[span] = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
  return flat


def unflatten_params(flat: np.ndarray, template: Any) -> Any:
  """Returns the tree of arrays in `flat`, as views of it."""
  spans, _ = _spans(template)
  leaves, structure = jax.tree.flatten(template)
  arrays = [
    flat[span].view(leaf.dtype).reshape(leaf.shape)
    for span, leaf in zip(spans, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, arrays)
