"""Doom episodes: our time limit against the engine's own, ends, frames, and a clean house."""

import os
from pathlib import Path

import numpy as np
import pytest

vizdoom = pytest.importorskip('vizdoom')

from sfjax.envs.doom.env import DoomEnv  # noqa: E402
from sfjax.envs.doom.scenarios import SCENARIOS  # noqa: E402
from sfjax.envs.registry import EnvContext  # noqa: E402

FRAMESKIP = 4
DOES_NOTHING = 0


@pytest.fixture
def make():
  """Makes environments of a scenario and closes them afterwards."""
  envs = []

  def make(name='basic', *, frameskip=FRAMESKIP, **options):
    context = EnvContext(frameskip=frameskip, options=options, render_mode='rgb_array')
    envs.append(DoomEnv(SCENARIOS[name], context))
    return envs[-1]

  yield make
  for env in envs:
    env.close()


def play(env, seed, actions):
  """Plays a whole episode; returns the rewards, tics, last two observations and flags."""
  previous, _ = env.reset(seed=seed)
  rewards, tics = [], []
  for action in actions:
    obs, reward, terminated, truncated, info = env.step(action)
    rewards.append(reward)
    tics.append(info['tics'])
    if terminated or truncated:
      return rewards, tics, (previous, obs), (terminated, truncated)
    previous = obs
  raise AssertionError(f'no end within {len(actions)} steps')


def play_engine_timed(name, limit, seed, actions, folder):
  """Plays an episode that the engine itself ends; returns the rewards, one a step.

  All but the limit, the window and the path is the scenario's file as it comes in the package.
  """
  scenario = SCENARIOS[name]
  game = vizdoom.DoomGame()
  game.load_config(os.path.join(vizdoom.scenarios_path, scenario.cfg))
  game.set_doom_config_path(str(folder / '_vizdoom.ini'))
  game.set_window_visible(False)
  game.set_episode_timeout(limit)
  buttons = [button.name for button in game.get_available_buttons()]
  vectors = [[button in action for button in buttons] for action in scenario.actions]
  game.init()
  try:
    game.set_seed(seed)
    game.new_episode()
    rewards = []
    for action in actions:
      rewards.append(game.make_action(vectors[action], FRAMESKIP))
      if game.is_episode_finished():
        return rewards
  finally:
    game.close()
  raise AssertionError(f'no end within {len(actions)} steps')


def random_actions(n, seed=0):
  return np.random.default_rng(seed).integers(4, size=n).tolist()


@pytest.mark.parametrize('name', SCENARIOS)
def test_the_time_limit_is_the_scenarios(name):
  """Catches a limit mistyped in the table."""
  game = vizdoom.DoomGame()
  game.load_config(os.path.join(vizdoom.scenarios_path, SCENARIOS[name].cfg))
  assert SCENARIOS[name].time_limit == game.get_episode_timeout()


@pytest.mark.parametrize(
  ('name', 'limit', 'seed', 'truncates'),
  [
    ('basic', 300, 0, True),
    ('basic', 300, 5, False),
    ('basic', 201, 0, True),
    ('defend_the_center', 2100, 0, False),
    ('defend_the_center', 202, 0, True),
    ('health_gathering', 2100, 0, False),
    ('health_gathering', 203, 0, True),
    ('health_gathering', 3, 0, True),
  ],
)
def test_an_episode_is_that_of_the_engines_own_limit(
  make, tmp_path, monkeypatch, name, limit, seed, truncates
):
  """Catches a limit off by the start time, by one, or by the rest of a frameskip."""
  monkeypatch.chdir(tmp_path)
  actions = random_actions(600, seed)
  expected = play_engine_timed(name, limit, seed, actions, tmp_path)
  rewards, tics, _, flags = play(make(name, time_limit=limit), seed, actions)
  assert rewards == expected
  assert flags == (not truncates, truncates)
  if truncates:
    # 201 tics at 4 a step are 50 steps of 4 and one of 1.
    assert sum(tics) == limit
    assert len(tics) == -(-limit // FRAMESKIP)
    assert tics[-1] == limit - FRAMESKIP * (len(tics) - 1)


def test_the_final_observation_of_a_truncation_is_the_live_frame(make):
  """Catches a black, stale or reset frame where the learner takes its bootstrap value."""
  actions = random_actions(80)
  _, _, (before, final), flags = play(make(time_limit=101), 0, actions)
  assert flags == (False, True)
  # The same game without a limit in the way: 25 steps of 4 tics, then one tic.
  free, single = make(), make(frameskip=1)
  free.reset(seed=0)
  for action in actions[:25]:
    obs, *_ = free.step(action)
  np.testing.assert_array_equal(before, obs)
  single.reset(seed=0)
  for action in [action for action in actions[:25] for _ in range(FRAMESKIP)] + [actions[25]]:
    obs, _, terminated, truncated, _ = single.step(action)
    assert not (terminated or truncated)
  np.testing.assert_array_equal(final, obs)
  assert final.mean() > 10 and not np.array_equal(final, before)


def test_a_kill_terminates_and_returns_the_last_live_frame(make):
  """Catches a success that is taken for a time-out, and a frame read from a dead game."""
  rewards, tics, (before, final), flags = play(make(), 5, random_actions(600, 5))
  assert flags == (True, False)
  assert max(rewards) > 80  # The kill pays 106.
  np.testing.assert_array_equal(final, before)
  assert final is not before and final.mean() > 10
  assert 1 <= tics[-1] <= FRAMESKIP


def test_an_end_at_the_limit_is_a_termination(make):
  """Catches both flags at once, where the last step of the time holds the kill."""
  actions = random_actions(600, 5)
  _, tics, _, _ = play(make(), 5, actions)
  _, limited, _, flags = play(make(time_limit=sum(tics)), 5, actions)
  assert (limited, flags) == (tics, (True, False))


def test_a_death_terminates_and_its_tics_are_counted_exactly(make):
  """Catches a death taken for a time-out, and tics counted to the end of the skip."""
  actions = random_actions(600)
  rewards, tics, _, flags = play(make('defend_the_center'), 2, actions)
  assert flags == (True, False)
  assert tics[-1] == 2  # This one dies in the middle of a step.
  single = make('defend_the_center', frameskip=1)
  every_tic = [action for action in actions for _ in range(FRAMESKIP)]
  single_rewards, single_tics, _, single_flags = play(single, 2, every_tic)
  assert single_flags == flags
  assert sum(tics) == len(single_tics)
  assert sum(rewards) == sum(single_rewards)


@pytest.mark.parametrize(
  ('name', 'action', 'variable', 'sign'),
  [
    ('basic', 1, 'POSITION_Y', 1),  # The player looks along x: left is up in y.
    ('basic', 2, 'POSITION_Y', -1),
    ('basic', 3, 'AMMO2', -1),
    ('defend_the_center', 1, 'ANGLE', 1),
    ('defend_the_center', 2, 'ANGLE', -1),
    ('defend_the_center', 3, 'AMMO2', -1),
    ('health_gathering', 1, 'ANGLE', 1),
    ('health_gathering', 2, 'ANGLE', -1),
    ('health_gathering', 3, 'POSITION_X', 1),
  ],
)
def test_each_action_presses_its_own_button(make, name, action, variable, sign):
  """Catches buttons in another order than the engine's: it takes any vector silently."""
  env = make(name)

  def changes(action):
    env.reset(seed=0)
    names = ('POSITION_X', 'POSITION_Y', 'ANGLE', 'AMMO2')
    variables = [getattr(vizdoom.GameVariable, name) for name in names]
    before = [env._game.get_game_variable(variable) for variable in variables]
    for _ in range(3):
      env.step(action)
    after = [env._game.get_game_variable(variable) for variable in variables]
    # Angles are degrees from 0 up to 360: a turn to the right from 0 is below 360.
    differences = [(b - a + 180) % 360 - 180 for a, b in zip(before, after, strict=True)]
    return {
      name: np.sign(value)
      for name, value in zip(names, differences, strict=True)
      if abs(value) > 0.5
    }

  assert changes(DOES_NOTHING) == {}
  assert changes(action) == {variable: sign}


def test_stepping_without_an_episode_is_an_error(make):
  """Catches a finished game that is stepped on, repeating its last reward for ever."""
  env = make(time_limit=4)
  with pytest.raises(RuntimeError, match='reset'):
    env.step(0)
  env.reset(seed=0)
  assert env.step(0)[3]
  with pytest.raises(RuntimeError, match='reset'):
    env.step(0)
  env.reset(seed=0)
  env.step(0)
  env.close()
  with pytest.raises(RuntimeError, match='reset'):
    env.step(0)


def test_seeds_are_taken_modulo_32_bits(make):
  """Catches an overflow: seeds come from a hash of 64 bits."""
  env = make()
  np.testing.assert_array_equal(env.reset(seed=2**40 + 7)[0], env.reset(seed=7)[0])


def test_render_returns_the_frame_that_was_observed(make):
  """Catches a video of another moment, or a view that the caller may spoil."""
  env = make()
  assert env.render() is None
  env.reset(seed=0)
  obs, *_ = env.step(1)
  frame = env.render()
  assert frame.shape == (120, 160, 3) and frame.dtype == np.uint8
  # Nearest neighbour: row 0 and column 0 survive as they are.
  np.testing.assert_array_equal(frame[0, 0], obs[0, 0])
  frame[:] = 0
  assert env.render().any()


@pytest.mark.parametrize(
  ('options', 'render_mode'),
  [({'time_limit': 0}, None), ({'time_limit': '9'}, None), ({}, 'human'), ({'limit': 3}, None)],
)
def test_impossible_settings_are_refused_at_once(options, render_mode):
  """Catches an error that comes up only when the engine starts, in a worker."""
  with pytest.raises(ValueError, match='Doom|time_limit'):
    DoomEnv(SCENARIOS['basic'], EnvContext(options=options, render_mode=render_mode))


def engine_files(env):
  return sorted(Path('/dev/shm').glob(f'ViZDoom*{env._instance_id}'))


def test_the_constructor_starts_nothing(make):
  """Catches a probe of the spaces that costs an engine."""
  env = make()
  assert env._game is None and env.action_space.n == 4


@pytest.mark.parametrize('own_folder', [True, False])
def test_nothing_is_left_behind(tmp_path, monkeypatch, own_folder):
  """Catches droppings in the user's folder, in the temporary folder and in shared memory."""
  cwd, scratch = tmp_path / 'cwd', tmp_path / 'with space'
  cwd.mkdir()
  scratch.mkdir()
  monkeypatch.chdir(cwd)
  monkeypatch.setattr('tempfile.tempdir', str(scratch))
  context = EnvContext(frameskip=FRAMESKIP, scratch=None if own_folder else str(scratch))
  env = DoomEnv(SCENARIOS['basic'], context)
  env.reset(seed=0)
  folder = next(scratch.iterdir()) if own_folder else scratch
  assert (folder / f'engine-{env._instance_id}').exists()
  assert len(engine_files(env)) == 3
  assert Path.cwd() == cwd
  env.close()
  env.close()
  assert not engine_files(env)
  assert not list(cwd.iterdir())
  assert not list(scratch.glob('engine-*'))
  assert not (own_folder and list(scratch.iterdir()))


def test_files_in_the_working_directory_do_not_change_the_game(make, tmp_path, monkeypatch):
  """Catches a stray doom2.wad or engine that is used in place of the package's."""
  expected, _ = make().reset(seed=0)
  monkeypatch.chdir(tmp_path)
  for name in ('doom2.wad', 'freedoom2.wad', 'vizdoom', '_vizdoom.cfg', '_vizdoom.ini'):
    (tmp_path / name).write_text('rubbish')
  np.testing.assert_array_equal(make().reset(seed=0)[0], expected)
