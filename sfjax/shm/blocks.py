"""Anonymous shared memory and the arrays laid out in it.

A block is a memfd: it has no name, so nothing of it can be left behind, and its size does not
depend on /dev/shm. The descriptor travels in the spawn arguments of a child.
"""

import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from sfjax.machine import available_memory
from sfjax.specs import ArraySpec

_ALIGNMENT = 64  # One cache line: arrays of different writers never share one.


def _aligned(nbytes: int) -> int:
  return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def block_bytes(specs: Mapping[str, ArraySpec]) -> int:
  """Returns the bytes a block needs to hold arrays of these specs."""
  return sum(_aligned(spec.nbytes) for spec in specs.values())


def _anonymous_file() -> int:
  if sys.platform == 'linux':
    return os.memfd_create('sfjax')
  # Serial runs on macOS: a file without a name is nearly as good.
  with tempfile.TemporaryFile() as file:
    return os.dup(file.fileno())


class SharedBlock:
  """A memory file that one process allocates and any child can map."""

  def __init__(self) -> None:
    self._own(_anonymous_file())

  def allocate(self, specs: Mapping[str, ArraySpec]) -> dict[str, np.ndarray]:
    """Reserves the memory for `specs` and maps it.

    Args:
      specs: name to shape and dtype; every process must map the block with equal specs.

    Returns:
      The zeroed arrays by name.

    Raises:
      OSError: there is not enough memory. Reserving now turns a later SIGBUS into this error; a
        memfd has no limit of its own, so reserving too much would call the kernel's killer.
    """
    nbytes = max(block_bytes(specs), mmap.PAGESIZE)
    available, reason = available_memory()
    if nbytes > available:
      raise OSError(
        errno.ENOMEM, f'shared memory of {nbytes} bytes asked, {available} available ({reason})'
      )
    os.ftruncate(self._fd, nbytes)
    if sys.platform == 'linux':
      os.posix_fallocate(self._fd, 0, nbytes)
    return self.map(specs)

  def map(self, specs: Mapping[str, ArraySpec]) -> dict[str, np.ndarray]:
    """Maps the allocated block and returns its arrays by name."""
    memory = mmap.mmap(self._fd, max(block_bytes(specs), mmap.PAGESIZE))
    arrays, offset = {}, 0
    for name, spec in specs.items():
      array = np.frombuffer(memory, spec.dtype, count=spec.size, offset=offset)
      arrays[name] = array.reshape(spec.shape)
      offset += _aligned(spec.nbytes)
    return arrays

  def __getstate__(self) -> dict[str, Any]:
    return {'fd': DupFd(self._fd)}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self._own(state['fd'].detach())

  def _own(self, fd: int) -> None:
    self._fd = fd
    weakref.finalize(self, os.close, fd)  # The memory lives on while an array of it does.
