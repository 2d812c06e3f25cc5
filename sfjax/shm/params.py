"""The versioned parameter buffer: the learner publishes, inference servers read without a lock.

Each policy has three slots under a version word. A reader copies the slot of the version it saw
and looks again: a copy is whole unless the writer came around to that slot meanwhile.
"""

import time
from typing import NamedTuple

import numpy as np

from sfjax.shm.blocks import SharedBlock
from sfjax.specs import ArraySpec, array_spec

NUM_SLOTS = 3


class PublishedParams(NamedTuple):
  """One consistent copy of a policy's parameters."""

  version: int  # SGD updates the policy has had.
  data: np.ndarray  # [nbytes] uint8, owned by the reader.


class ParameterBuffer:
  """Parameters of P policies as contiguous bytes, each with its own version."""

  def __init__(
    self, block: SharedBlock, *, num_policies: int, nbytes: int, allocate: bool = False
  ) -> None:
    """Maps the buffer.

    Args:
      block: the memory; the learner allocates it, since only a process with jax knows the size.
      num_policies: P.
      nbytes: size of one policy's parameters.
      allocate: whether this process is the one that allocates.
    """
    specs: dict[str, ArraySpec] = {
      'published': array_spec(np.int64, num_policies, 8),  # One cache line a policy.
      'data': array_spec(np.uint8, num_policies, NUM_SLOTS, nbytes),
    }
    arrays = block.allocate(specs) if allocate else block.map(specs)
    # 'published' counts publications and never repeats; it is the seqlock. Versions may jump.
    self._published = arrays['published'][:, 0]
    self._versions = arrays['published'][:, 1 : 1 + NUM_SLOTS]
    self._data = arrays['data']

  def publish(self, policy: int, version: int, data: np.ndarray) -> None:
    """Makes `data` ([nbytes] uint8) the newest parameters of `policy`.

    Raises:
      ValueError: `version` is not above the one published before.
    """
    count = int(self._published[policy])
    if count and version <= int(self._versions[policy, count % NUM_SLOTS]):
      raise ValueError(f'policy {policy}: version {version} was published before')
    slot = (count + 1) % NUM_SLOTS
    self._data[policy, slot] = data
    self._versions[policy, slot] = version
    self._published[policy] = count + 1

  def count(self, policy: int) -> int:
    """How often `policy` was published; 0 means never, and a rise means newer parameters."""
    return int(self._published[policy])

  def read(self, policy: int, *, timeout_s: float = 10.0) -> PublishedParams:
    """Copies the newest parameters of `policy`.

    Raises:
      LookupError: the policy was never published.
      TimeoutError: the writer overtook every copy for `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
      count = int(self._published[policy])
      if not count:
        raise LookupError(f'policy {policy} has no parameters yet')
      slot = count % NUM_SLOTS
      data, version = self._copy(policy, slot)
      # The writer of publication count + 3 fills this slot, and starts once count + 2 is out.
      if int(self._published[policy]) - count < NUM_SLOTS - 1:
        return PublishedParams(version, data)
    raise TimeoutError(f'policy {policy}: no whole copy of the parameters in {timeout_s} s')

  def _copy(self, policy: int, slot: int) -> tuple[np.ndarray, int]:
    return self._data[policy, slot].copy(), int(self._versions[policy, slot])
