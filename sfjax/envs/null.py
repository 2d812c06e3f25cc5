"""An environment that costs nothing, to measure transport: every observation is different."""

from typing import Any

import gymnasium
import numpy as np

from sfjax.envs.registry import EnvContext

_INFO = {'tics': 1}


class NullEnv(gymnasium.Env):
  """Fills 72 × 128 × 3 bytes with one 64-bit word: env_id << 40 | observations before this one.

  The array is the same object every time; episodes never end.
  """

  observation_space = gymnasium.spaces.Box(0, 255, (72, 128, 3), np.uint8)
  action_space = gymnasium.spaces.Discrete(4)

  def __init__(self, context: EnvContext) -> None:
    self._obs = np.zeros((72, 128, 3), np.uint8)
    self._words = self._obs.reshape(-1).view(np.uint64)
    self._word = context.env_id << 40

  def reset(
    self, *, seed: int | None = None, options: dict[str, Any] | None = None
  ) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the first observation."""
    del seed, options
    self._words.fill(self._word)
    return self._obs, {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    """Returns the next observation."""
    del action
    self._word += 1
    self._words.fill(self._word)
    return self._obs, 0.0, False, False, _INFO
