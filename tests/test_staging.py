"""Staging: no buffer is written while a program reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfjax.specs import array_spec
from sfjax.staging import Buffer, Staging, aligned_zeros
from tests.fakes import FakeOutput

SPECS = {'data': array_spec(np.float32, 1000, 256), 'mask': array_spec(bool, 1000)}


@jax.jit
def slow_sum(data: jax.Array, mask: jax.Array) -> jax.Array:
  """Reads its whole input again and again."""

  def add(i: jax.Array, total: jax.Array) -> jax.Array:
    return total + jnp.where(mask, jnp.sin(data + i).sum(axis=1), 0.0).sum()

  return jax.lax.fori_loop(0, 4, add, jnp.float32(0.0))


def fill(buffer: Buffer, number: int) -> None:
  buffer['data'][...] = np.linspace(0, number, buffer['data'].size).reshape(1000, 256)
  buffer['mask'][...] = np.arange(1000) % 3 > 0


def spoil(buffer: Buffer) -> None:
  buffer['data'].fill(np.nan)
  buffer['mask'].fill(True)


def test_garbage_written_at_the_earliest_allowed_moment_changes_no_result():
  """Catches a buffer handed out when the call has returned: jax reads it while it runs."""
  staging, results, waits = Staging(SPECS), [], 0
  for number in range(60):
    while (buffer := staging.acquire()) is None:
      waits += 1
    spoil(buffer)
    fill(buffer, number % 10)
    output = slow_sum(buffer['data'], buffer['mask'])
    staging.lend(buffer, {'sum': output})
    results.append(output)
  assert waits > 0, 'the program was too fast to prove anything'
  buffer = {name: aligned_zeros(spec) for name, spec in SPECS.items()}
  for number in range(10):
    fill(buffer, number)
    expected = slow_sum(buffer['data'], buffer['mask']).block_until_ready()
    assert [float(result) for result in results[number::10]] == [float(expected)] * 6


def test_the_oldest_buffer_waits_for_every_output():
  """Catches a look at one output of several, or at those of another buffer."""
  staging = Staging(SPECS)
  a, b = staging.acquire(), staging.acquire()
  assert a is not None and b is not None and a is not b
  assert staging.acquire() is None
  early, late, other = FakeOutput(), FakeOutput(), FakeOutput(ready=True)
  staging.lend(a, {'early': early, 'late': [late]})
  assert staging.acquire() is None
  staging.lend(b, (other,))
  early.ready = True
  assert staging.acquire() is None
  late.ready = True
  assert staging.acquire() is a
  assert staging.acquire() is b
  assert staging.acquire() is None
  staging.lend(b, ())  # No program read it.
  assert staging.acquire() is b


@pytest.mark.parametrize('shape', ((), (1,), (7, 3), (5, 0), (1000, 33)))
@pytest.mark.parametrize('dtype', (np.uint8, np.float32, np.int64, bool))
def test_memory_starts_where_jax_takes_it_in_place(shape, dtype):
  """Catches unaligned memory, which jax copies at every call, and arrays that overlap."""
  arrays = [aligned_zeros(array_spec(dtype, *shape)) for _ in range(20)]
  for i, array in enumerate(arrays):
    assert array.ctypes.data % 64 == 0 or array.size == 0
    assert (array.shape, array.dtype) == (shape, dtype)
    array[...] = i % 2
  for i, array in enumerate(arrays):
    assert (array == i % 2).all()
