"""An environment that costs next to nothing, to measure the transport of pixels alone."""

import time
from typing import Any

import gymnasium
import numpy as np

from sfjax.envs.registry import EnvContext

SHAPE = (72, 128, 3)
NUM_ACTIONS = 4
COUNTER_BITS = 40


class NullEnv(gymnasium.Env[np.ndarray, Any]):
  """Never ends, pays nothing, and makes every observation unique in the run.

  An observation viewed as uint64 holds one word everywhere: `env_id << 40 | counter`, where the
  counter is how many observations this environment had produced before it. A reader that
  compares the first, a middle and the last word sees a swapped, stale or torn copy.
  """

  def __init__(self, context: EnvContext) -> None:
    self.observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    self.action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
    # One array for all observations: the caller copies, as it must with any environment.
    self._obs = np.zeros(SHAPE, np.uint8)
    self._words = self._obs.reshape(-1).view(np.uint64)
    self._next_word = context.env_id << COUNTER_BITS
    self._tics = context.frameskip
    self._sleep_s = float(context.options.get('sleep_s', 0.0))  # Stands for the time of a step.

  def reset(
    self, *, seed: int | None = None, options: dict[str, Any] | None = None
  ) -> tuple[np.ndarray, dict[str, Any]]:
    """Produces the next observation; the counter goes on."""
    del seed, options
    return self._observe(), {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    """Produces the next observation, whatever the action."""
    if self._sleep_s:
      time.sleep(self._sleep_s)
    return self._observe(), 0.0, False, False, {'tics': self._tics}

  def _observe(self) -> np.ndarray:
    self._words.fill(self._next_word)
    self._next_word += 1
    return self._obs
