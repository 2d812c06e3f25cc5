"""Adapts a Gymnasium environment to the contract of the registry."""

from typing import Any

import gymnasium


class FrameSkip(gymnasium.Wrapper):
  """Repeats each action, adds up the rewards, stops at an end, and counts tics."""

  def __init__(self, env: gymnasium.Env, frameskip: int) -> None:
    super().__init__(env)
    self._frameskip = frameskip

  def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Steps up to `frameskip` times."""
    total, tics = 0.0, 0
    obs, terminated, truncated, info = None, False, False, {}
    while tics < self._frameskip and not (terminated or truncated):
      obs, reward, terminated, truncated, info = self.env.step(action)
      total += float(reward)
      tics += 1
    return obs, total, bool(terminated), bool(truncated), {**info, 'tics': tics}
