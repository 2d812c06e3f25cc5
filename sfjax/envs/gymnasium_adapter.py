"""Brings a registered Gymnasium environment to the contract of `sfjax.envs.registry`."""

from typing import Any

import gymnasium


class GymnasiumAdapter(gymnasium.Wrapper):
  """Repeats each action, sums the rewards, counts tics, and returns plain Python values."""

  def __init__(self, env: gymnasium.Env, *, frameskip: int) -> None:
    super().__init__(env)
    self._frameskip = frameskip
    self._closed = False

  def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Takes the action `frameskip` times, fewer where the episode ends."""
    total, tics = 0.0, 0
    while True:
      obs, reward, terminated, truncated, info = self.env.step(action)
      total += float(reward)
      tics += 1
      if terminated or truncated or tics >= self._frameskip:
        return obs, total, bool(terminated), bool(truncated), {**info, 'tics': tics}

  def close(self) -> None:
    """Closes the environment; the second time does nothing, which not all of them tolerate."""
    if not self._closed:
      self._closed = True
      super().close()
