"""A memory task: a cue that is shown once is asked for some steps later."""

from typing import Any

import gymnasium
import numpy as np

from sfjax.envs.registry import EnvContext

DEFAULT_DELAY = 8


class RecallEnv(gymnasium.Env[np.ndarray, Any]):
  """The first observation shows one of two cues, the last one asks which it was.

  An episode has `delay` steps between the two, whose actions do not matter, and pays 1 for the
  right answer and -1 for the wrong one: 0 on average without memory, 1 with it.
  """

  def __init__(self, context: EnvContext) -> None:
    # One number a cue, and one that is 1 when the answer is due.
    self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
    self.action_space = gymnasium.spaces.Discrete(2)
    self._delay = int(context.options.get('delay', DEFAULT_DELAY))
    self._cue, self._step = 0, 0

  def reset(
    self, *, seed: int | None = None, options: dict[str, Any] | None = None
  ) -> tuple[np.ndarray, dict[str, Any]]:
    """Draws and shows a cue."""
    super().reset(seed=seed)
    self._cue, self._step = int(self.np_random.integers(2)), 0
    return self._observe(), {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    """Goes on, or ends with the reward for the answer."""
    answered = self._step > self._delay
    reward = (1.0 if action == self._cue else -1.0) if answered else 0.0
    self._step += 1
    return self._observe(), reward, answered, False, {'tics': 1}

  def _observe(self) -> np.ndarray:
    obs = np.zeros(3, np.float32)
    if self._step == 0:
      obs[self._cue] = 1.0
    obs[2] = self._step > self._delay
    return obs
