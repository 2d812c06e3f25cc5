"""Two devices on the CPU and strict shapes for every test, set before jax is imported.

This file must not import jax: it would read the environment too early, and many tests do without.
"""

import os
import sys
from collections.abc import Iterator

import pytest

assert 'jax' not in sys.modules, 'a plugin imported jax before the tests could choose its devices'

DEVICES = '--xla_force_host_platform_device_count=2'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {DEVICES}'.strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'


@pytest.fixture
def compilations() -> Iterator[list[float]]:
  """The seconds of every compilation so far in this test."""
  from jax import monitoring

  seconds: list[float] = []

  def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == '/jax/core/compile/backend_compile_duration':
      seconds.append(duration_secs)

  monitoring.register_event_duration_secs_listener(listen)
  yield seconds
  monitoring.unregister_event_duration_listener(listen)
