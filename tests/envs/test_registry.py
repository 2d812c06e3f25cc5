"""What every environment from the registry promises, for a Gymnasium id and for a Doom scenario."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sfjax.envs.registry import EnvContext, make_env

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=['CartPole-v1', 'doom:basic'])
def env(request):
  if request.param.startswith('doom:'):
    pytest.importorskip('vizdoom')
  env = make_env(request.param, EnvContext(frameskip=4))
  yield env
  env.close()


def play(env, seed, actions):
  """Plays an episode as far as the actions reach; returns copies of all that came back."""
  obs, _ = env.reset(seed=seed)
  steps = [(obs.copy(), 0.0, False, False, 0)]
  for action in actions:
    obs, reward, terminated, truncated, info = env.step(action)
    steps.append((obs.copy(), reward, terminated, truncated, info['tics']))
    if terminated or truncated:
      break
  return steps


def assert_same(one, other):
  assert len(one) == len(other)
  for (obs, *rest), (other_obs, *other_rest) in zip(one, other, strict=True):
    np.testing.assert_array_equal(obs, other_obs)
    assert rest == other_rest


def test_an_episode_depends_on_its_seed_alone(env):
  """Catches a seed that is used once, or a generator that runs on from episode to episode."""
  actions = np.random.default_rng(0).integers(env.action_space.n, size=40)
  first = play(env, 5, actions)
  other = play(env, 6, actions[:7])
  assert_same(play(env, 5, actions), first)
  assert not np.array_equal(first[0][0], other[0][0])


def test_an_episode_does_not_depend_on_the_instance(env):
  """Catches a first episode that differs from later ones, as one that `init` began."""
  actions = [0, 1, 1, 0, 1, 0]
  play(env, 1, actions)
  fresh = make_env('doom:basic' if 'Doom' in repr(env) else 'CartPole-v1', EnvContext(frameskip=4))
  try:
    assert_same(play(fresh, 9, actions), play(env, 9, actions))
  finally:
    fresh.close()


def test_types_are_what_the_contract_says(env):
  """Catches NumPy scalars, which pickle large and compare oddly, and a space that lies."""
  obs, info = env.reset(seed=0)
  assert isinstance(info, dict)
  assert env.observation_space.contains(obs)
  obs, reward, terminated, truncated, info = env.step(np.int64(1))
  assert env.observation_space.contains(obs)
  assert [type(x) for x in (reward, terminated, truncated)] == [float, bool, bool]
  assert info['tics'] == 4 and type(info['tics']) is int


def test_observations_are_not_views_of_one_buffer(env):
  """Catches an observation that the next step overwrites."""
  obs, _ = env.reset(seed=0)
  seen = [obs] + [env.step(action)[0] for action in (1, 0)]
  copies = [x.copy() for x in seen]
  env.step(1)
  env.reset(seed=1)
  for obs, copy in zip(seen, copies, strict=True):
    np.testing.assert_array_equal(obs, copy)
  assert not np.array_equal(seen[1], seen[2])


def test_close_may_be_called_twice_and_before_the_first_reset(env):
  """Catches a shutdown that fails because a worker's `finally` closes again."""
  env.close()
  env.close()


@pytest.mark.parametrize(
  ('name', 'nearest'),
  [
    ('doom:basik', 'doom:basic'),
    ('doom:', 'doom:basic'),
    ('cartpole-v1', 'CartPole-v1'),
    ('CartPole-v7', 'CartPole-v1'),
    ('null:pixel', 'null:pixels'),
  ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
  """Catches a KeyError, or Gymnasium's own exception, in place of an answer that helps."""
  with pytest.raises(ValueError, match=f'{name}.*nearest:.*{nearest}'):
    make_env(name, EnvContext())


@pytest.mark.parametrize('name', ['doom:basic', 'CartPole-v1'])
def test_an_unknown_option_is_refused(name):
  """Catches a typo in `config.env.kwargs` that is silently ignored."""
  if name.startswith('doom:'):
    pytest.importorskip('vizdoom')
  with pytest.raises(ValueError, match='tiem_limit'):
    make_env(name, EnvContext(options={'tiem_limit': 3}))


def test_missing_vizdoom_says_what_to_install(monkeypatch):
  """Catches a bare ModuleNotFoundError from deep inside a worker."""
  monkeypatch.setitem(sys.modules, 'vizdoom', None)
  monkeypatch.delitem(sys.modules, 'sfjax.envs.doom.env', raising=False)
  with pytest.raises(ImportError, match=r"pip install 'sfjax\[doom\]'"):
    make_env('doom:basic', EnvContext())


def loaded_after(code, names):
  program = f'import sys\n{code}\nprint(*sorted({set(names)} & set(sys.modules)))'
  result = subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True
  )
  return result.stdout.split()


def test_importing_the_registry_loads_no_simulator():
  """Catches an import at the top that makes `--config=cartpole` need ViZDoom."""
  code = 'import sfjax.envs.registry, sfjax.envs.doom.scenarios, sfjax.envs.doom.leftovers'
  assert not loaded_after(code, ['vizdoom', 'cv2', 'gymnasium', 'jax'])


@pytest.mark.parametrize('name', ['CartPole-v1', 'null:pixels', 'doom:basic'])
def test_making_an_environment_does_not_load_jax(name):
  """Catches a worker of 150 MB with a GPU context."""
  if name.startswith('doom:'):
    pytest.importorskip('vizdoom')
  code = f'from sfjax.envs.registry import *\nmake_env({name!r}, EnvContext()).reset(seed=0)'
  assert not loaded_after(code, ['jax', 'flax', 'optax', 'chex'])
