"""Frameskip, tics and ends of plain Gymnasium environments."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from sfjax.envs.gymnasium_adapter import GymnasiumAdapter
from sfjax.envs.registry import EnvContext, make_env


class CountingEnv(gymnasium.Env):
  """Pays 1, 2, 3 ...; ends at its `length`; refuses a second close."""

  metadata: ClassVar[dict[str, Any]] = {'render_modes': []}
  observation_space = gymnasium.spaces.Box(0, 255, (1,), np.uint8)
  action_space = gymnasium.spaces.Discrete(2)

  def __init__(self, length: int, *, truncates: bool) -> None:
    self.length, self.truncates = length, truncates
    self.actions: list[int] = []
    self.closed = 0

  def step(self, action):
    self.actions.append(action)
    t = len(self.actions)
    assert t <= self.length, 'stepped after the end'
    ends = t == self.length
    obs = np.array([t], np.uint8)
    return obs, np.float64(t), ends and not self.truncates, ends and self.truncates, {'t': t}

  def close(self):
    self.closed += 1
    assert self.closed == 1


@pytest.mark.parametrize('truncates', [False, True])
def test_frameskip_repeats_sums_and_stops_at_the_end(truncates):
  """Catches a reward that is overwritten, an action taken once, and a step beyond the end."""
  inner = CountingEnv(5, truncates=truncates)
  env = GymnasiumAdapter(inner, frameskip=3)
  # 1 + 2 + 3 = 6; then 4 + 5 = 9 and the end, after 2 of 3.
  obs, reward, terminated, truncated, info = env.step(1)
  assert (obs.tolist(), reward, terminated, truncated, info) == (
    [3],
    6.0,
    False,
    False,
    {'t': 3, 'tics': 3},
  )
  obs, reward, terminated, truncated, info = env.step(0)
  assert (obs.tolist(), reward, info) == ([5], 9.0, {'t': 5, 'tics': 2})
  assert (terminated, truncated) == (not truncates, truncates)
  assert inner.actions == [1, 1, 1, 0, 0]


def test_close_reaches_the_environment_once():
  """Catches a second close handed on to an environment that does not tolerate it."""
  inner = CountingEnv(1, truncates=False)
  env = GymnasiumAdapter(inner, frameskip=1)
  env.close()
  env.close()
  assert inner.closed == 1


def test_cartpole_time_limit_gives_the_true_final_observation():
  """Catches a limit counted in steps instead of frames, and a reset before the return."""
  env = make_env('CartPole-v1', EnvContext(frameskip=3, options={'max_episode_steps': 5}))
  bare = gymnasium.make('CartPole-v1')
  env.reset(seed=2)
  bare.reset(seed=2)
  _, reward, terminated, truncated, info = env.step(1)
  assert (reward, terminated, truncated, info['tics']) == (3.0, False, False, 3)
  obs, reward, terminated, truncated, info = env.step(0)
  assert (reward, terminated, truncated, info['tics']) == (2.0, False, True, 2)
  expected = [bare.step(action)[0] for action in (1, 1, 1, 0, 0)][-1]
  np.testing.assert_array_equal(obs, expected)


def test_cartpole_falls_over_as_a_termination():
  """Catches flags in the wrong order."""
  env = make_env('CartPole-v1', EnvContext(frameskip=4))
  env.reset(seed=0)
  tics = 0
  for _ in range(20):
    _, _, terminated, truncated, info = env.step(1)
    tics += info['tics']
    if terminated:
      break
  assert (terminated, truncated) == (True, False)
  assert 8 <= tics <= 12  # A pole pushed one way falls after about 9 frames.
