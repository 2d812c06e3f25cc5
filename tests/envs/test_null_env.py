"""The environment that measures transport."""

import numpy as np

from sfjax.envs.registry import EnvContext, make_env


def test_every_observation_names_its_environment_and_its_number():
  """Catches a counter that starts over at a reset or is shared, and words left unfilled."""
  env = make_env('null:pixels', EnvContext(env_id=3, frameskip=4))
  observations = [env.reset(seed=0)[0].copy()]
  for action in range(4):
    obs, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info) == (0.0, False, False, {'tics': 4})
    observations.append(obs.copy())
  observations.append(env.reset(seed=0)[0].copy())
  for counter, obs in enumerate(observations):
    assert env.observation_space.contains(obs)
    words = obs.reshape(-1).view(np.uint64)
    assert words.shape == (3456,)
    assert set(words.tolist()) == {3 << 40 | counter}


def test_the_spaces_are_those_of_doom():
  """Catches a transport measured with frames of another size."""
  env = make_env('null:pixels', EnvContext())
  assert env.observation_space.shape == (72, 128, 3)
  assert env.observation_space.dtype == np.uint8
  assert env.action_space.n == 4  # pyright: ignore[reportAttributeAccessIssue]
