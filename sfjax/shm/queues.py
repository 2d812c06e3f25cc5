"""Queues of small fixed-size records over a pipe.

A write of at most PIPE_BUF bytes is atomic, so many processes put without a lock, one read takes
everything that waits, and a process that dies leaves no lock held. A pipe also orders memory: what
was written to a shared block before `put` is seen after `get_all`.
"""

import fcntl
import mmap
import os
import select
import struct
import sys
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

_PIPE_BUF = select.PIPE_BUF
_F_SETPIPE_SZ = 1031
# What an unprivileged process may ask for; other systems grow a pipe by themselves, to 64 KiB.
_MAX_PIPE_BYTES = 1 << 20 if sys.platform == 'linux' else 1 << 16
_STRUCT_CODES = {'i4': 'i', 'i8': 'q', 'f8': 'd'}


class RecordQueue:
  """A bounded queue of records of one dtype: many writers, one reader, never blocking."""

  def __init__(self, dtype: np.dtype, capacity: int) -> None:
    """Opens the pipe.

    Args:
      dtype: a structured dtype without padding, at most PIPE_BUF bytes.
      capacity: the most records that can exist at a time.

    Raises:
      ValueError: the records do not fit a pipe.
    """
    # A write never spans pages, and one page more may be held by a reader that is half through it.
    nbytes = (-(-capacity // max(mmap.PAGESIZE // dtype.itemsize, 1)) + 1) * mmap.PAGESIZE
    if dtype.itemsize > _PIPE_BUF or nbytes > _MAX_PIPE_BYTES:
      raise ValueError(
        f'{capacity} records of {dtype.itemsize} bytes need {nbytes} bytes; a pipe holds '
        f'{_MAX_PIPE_BYTES} in records of at most {_PIPE_BUF}; use fewer environments'
      )
    self.dtype = dtype
    self._read_fd, self._write_fd = os.pipe()
    os.set_blocking(self._read_fd, False)
    os.set_blocking(self._write_fd, False)
    if sys.platform == 'linux':
      fcntl.fcntl(self._write_fd, _F_SETPIPE_SZ, min(max(2 * nbytes, 65536), _MAX_PIPE_BYTES))
    self._prepare()

  def _prepare(self) -> None:
    assert self.dtype.fields is not None
    codes = ''.join(_STRUCT_CODES[field[0].str[1:]] for field in self.dtype.fields.values())
    self._struct = struct.Struct('=' + codes)
    self._chunk = (1 << 18) // self.dtype.itemsize * self.dtype.itemsize
    self._poll = select.poll()
    self._poll.register(self._read_fd, select.POLLIN)
    for fd in (self._read_fd, self._write_fd):
      weakref.finalize(self, os.close, fd)

  def put(self, *values: float) -> bool:
    """Puts one record, its fields in the order of the dtype; returns False when full."""
    try:
      os.write(self._write_fd, self._struct.pack(*values))
    except BlockingIOError:
      return False
    return True

  def get_all(self) -> np.ndarray:
    """Takes every record that waits, oldest first; a structured array, empty when none does."""
    chunks = []
    while True:
      try:
        chunk = os.read(self._read_fd, self._chunk)
      except BlockingIOError:
        break
      if not chunk:
        break
      chunks.append(chunk)
      if len(chunk) < self._chunk:
        break
    return np.frombuffer(b''.join(chunks), self.dtype)

  def wait(self, timeout_s: float) -> bool:
    """Waits until a record is there; returns False when none came in `timeout_s` seconds."""
    return bool(self._poll.poll(timeout_s * 1000))

  def fileno(self) -> int:
    """The read end, to wait on several queues at once."""
    return self._read_fd

  def __getstate__(self) -> dict[str, Any]:
    return {'dtype': self.dtype, 'read': DupFd(self._read_fd), 'write': DupFd(self._write_fd)}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.dtype = state['dtype']
    self._read_fd, self._write_fd = state['read'].detach(), state['write'].detach()
    self._prepare()
