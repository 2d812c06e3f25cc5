"""Staging arrays: host memory that jax may read, and the rule for writing it again.

On the CPU jax uses aligned NumPy memory in place and runs after the call has returned, so a buffer
handed to a program is written again only when an output of that program is ready.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from sfjax.specs import ArraySpec

_ALIGNMENT = 64

Buffer = dict[str, np.ndarray]


def aligned_zeros(spec: ArraySpec) -> np.ndarray:
  """Returns a zeroed array whose memory starts at a multiple of 64 bytes."""
  memory = np.zeros(spec.nbytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + spec.nbytes].view(spec.dtype).reshape(spec.shape)


class Staging:
  """A few buffers of equal specs, used in turn."""

  def __init__(self, specs: Mapping[str, ArraySpec], *, count: int = 2) -> None:
    self._free: deque[Buffer] = deque(
      {name: aligned_zeros(spec) for name, spec in specs.items()} for _ in range(count)
    )
    self._lent: deque[tuple[Buffer, Any]] = deque()

  def acquire(self) -> Buffer | None:
    """Returns a buffer that nothing reads, or None while every one is in use."""
    while self._lent and all(leaf.is_ready() for leaf in jax.tree.leaves(self._lent[0][1])):
      self._free.append(self._lent.popleft()[0])
    return self._free.popleft() if self._free else None

  def lend(self, buffer: Buffer, outputs: Any) -> None:
    """Gives a buffer back that the program behind `outputs` (a tree of jax arrays) may read."""
    self._lent.append((buffer, outputs))
