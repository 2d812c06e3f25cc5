"""Policies that act with the parameters the learner publishes."""

from typing import Any

import jax
import numpy as np

from sfjax.inference.act import Act
from sfjax.inference.server import Answer, Arrays
from sfjax.models.flat_params import unflatten_params
from sfjax.shm.params import ParameterBuffer
from sfjax.specs import MASK, ArraySpec
from sfjax.staging import Staging


class PublishedPolicies:
  """The newest published version of each policy behind one compiled `act`."""

  def __init__(
    self,
    act: Act,
    *,
    template: Any,
    params: ParameterBuffer,
    num_policies: int,
    specs: dict[str, ArraySpec],
  ) -> None:
    self._act, self._template, self._buffer = act, template, params
    self._seen = [0] * num_policies
    self._params: list[Any] = [None] * num_policies
    self._versions = [0] * num_policies
    self._staging = Staging(specs)

  def refresh(self, policy: int) -> None:
    """Takes over the newest parameters of a policy."""
    count = self._buffer.count(policy)
    if count != self._seen[policy]:
      published = self._buffer.read(policy)
      self._params[policy] = jax.device_put(unflatten_params(published.data, self._template))
      self._versions[policy], self._seen[policy] = published.version, count

  def buffer(self) -> Arrays:
    """Returns a batch buffer that no program reads any more."""
    buffer = self._staging.acquire()
    assert buffer is not None, 'act waits for its outputs, so a buffer is always free'
    return buffer

  def act(self, policy: int, buffer: Arrays, n: int, bucket: int) -> Answer:
    """Acts on the first `n` rows of `buffer`, padded to `bucket` rows."""
    obs = {
      name.removeprefix('obs/'): array[:bucket]
      for name, array in buffer.items()
      if name.startswith('obs/')
    }
    output = self._act(
      self._params[policy],
      obs,  # pyright: ignore[reportArgumentType]
      buffer['core'][:bucket],  # pyright: ignore[reportArgumentType]
      buffer['first'][:bucket],  # pyright: ignore[reportArgumentType]
      buffer['identity'][:bucket],  # pyright: ignore[reportArgumentType]
      buffer[MASK][:bucket] if MASK in buffer else None,  # pyright: ignore[reportArgumentType]
    )
    self._staging.lend(buffer, output)
    return Answer(*(np.asarray(leaf)[:n] for leaf in output), version=self._versions[policy])

  def warm_up(self, buckets: tuple[int, ...]) -> None:
    """Compiles `act` for every bucket size."""
    for bucket in buckets:
      self.act(0, self.buffer(), bucket, bucket)
