"""An environment that ends the run when it is sent what its space or its mask does not allow."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class StrictHybridEnv(gymnasium.Env):
  """Pays for the one choice that a number names and for coming near another number with a box.

  Of four choices two are forbidden, others at each step; never the one that pays. An observation is
  a dictionary of two vectors and the mask.
  """

  LENGTH = 10

  def __init__(self, render_mode: str | None = None) -> None:
    self.render_mode = render_mode
    self.observation_space = spaces.Dict(
      {
        'action_mask': spaces.MultiBinary(4),
        'wanted': spaces.Box(0.0, 1.0, (4,), np.float32),
        'near': spaces.Box(-1.0, 1.0, (1,), np.float32),
      }
    )
    self.action_space = spaces.Dict(
      {'choice': spaces.Discrete(4, start=7), 'move': spaces.Box(-2.0, 2.0, (1,), np.float32)}
    )

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
    super().reset(seed=seed)
    self._steps = 0
    return self._observe(), {}

  def step(self, action: Any) -> Any:
    if not self.action_space.contains(action):
      raise ValueError(f'{action} is no member of {self.action_space}')
    choice = int(action['choice']) - 7
    if not self._mask[choice]:
      raise ValueError(f'choice {choice} is forbidden by {self._mask}')
    reward = float(choice == self._wanted) - abs(float(action['move'][0]) - self._near)
    self._steps += 1
    return self._observe(), reward, False, self._steps == self.LENGTH, {}

  def _observe(self) -> dict[str, np.ndarray]:
    rng = self.np_random
    self._wanted, self._near = int(rng.integers(4)), float(rng.uniform(-1, 1))
    self._mask = np.ones(4, np.int8)
    others = [i for i in range(4) if i != self._wanted]
    self._mask[rng.choice(others, 2, replace=False)] = 0
    return {
      'action_mask': self._mask,
      'wanted': np.eye(4, dtype=np.float32)[self._wanted],
      'near': np.array([self._near], np.float32),
    }


gymnasium.register('StrictHybrid-v0', f'{__name__}:StrictHybridEnv')
