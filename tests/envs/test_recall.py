"""The memory task: nothing but the first observation tells the answer."""

import numpy as np

from sfjax.envs.registry import EnvContext, make_env


def episode(env, seed, answer):
  """Plays an episode; returns all observations and the rewards."""
  obs, _ = env.reset(seed=seed)
  seen, rewards, terminated = [obs], [], False
  while not terminated:
    action = answer(seen) if obs[2] else 0
    obs, reward, terminated, _, _ = env.step(action)
    seen.append(obs)
    rewards.append(reward)
  return np.array(seen), rewards


def test_only_the_first_observation_tells_the_answer():
  """Catches a cue that stays visible, so that a policy without memory would do."""
  env = make_env('recall', EnvContext(options={'delay': 4}))
  cues = []
  for seed in range(20):
    seen, rewards = episode(env, seed, lambda seen: int(np.argmax(seen[0][:2])))
    # Step 0 shows the cue, 4 pass, and the action on observation 5 is the answer.
    assert len(rewards) == 6
    assert rewards == [0.0] * 5 + [1.0]
    assert seen[0][:2].sum() == 1
    assert (seen[1:, :2] == 0).all()
    assert seen[:6, 2].tolist() == [0, 0, 0, 0, 0, 1]
    cues.append(int(np.argmax(seen[0][:2])))
    _, wrong = episode(env, seed, lambda seen: int(np.argmin(seen[0][:2])))
    assert wrong[-1] == -1.0
  assert 4 < sum(cues) < 16
