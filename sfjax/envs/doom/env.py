"""A Doom scenario as a Gymnasium environment, directly over `vizdoom.DoomGame`."""

import contextlib
import os
import tempfile
from typing import Any

import cv2
import gymnasium
import numpy as np
import vizdoom

from sfjax.envs.doom.leftovers import remove_engine, write_launcher
from sfjax.envs.doom.scenarios import Scenario
from sfjax.envs.registry import EnvContext

HEIGHT, WIDTH = 72, 128
TICS_PER_S = 35
NO_TIMEOUT = 0

# One thread per worker: OpenCV's pool costs more than it gives on images this small.
cv2.setNumThreads(0)


class DoomEnv(gymnasium.Env[np.ndarray, Any]):
  """Plays one scenario: [72, 128, 3] uint8 frames, a flat list of actions, our own time limit.

  The engine's own time limit is off, because it leaves no frame to bootstrap from. Ours counts the
  same tics: at the limit the game is still live, and its frame is the final observation of an
  episode that was truncated. Where the *game* ends an episode (a death, a map's exit) it has no
  frame left; `step` then returns the last live one, which nothing may learn a value from.

  The engine starts at the first `reset`. Its process dies with this one.
  """

  def __init__(self, scenario: Scenario, context: EnvContext) -> None:
    """Describes the environment.

    Args:
      scenario: what to play.
      context: frameskip, render_mode, scratch. Its one option is `time_limit`, in tics.

    Raises:
      ValueError: an unknown option or render mode, or a time limit that is none.
    """
    _check(context)
    self._scenario, self._context = scenario, context
    self._limit: int = context.options.get('time_limit', scenario.time_limit)
    self._actions = scenario.button_vectors
    self.render_mode = context.render_mode
    self.metadata = {
      'render_modes': ['rgb_array'],
      'render_fps': TICS_PER_S / context.frameskip,
    }
    self.observation_space = gymnasium.spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    self.action_space = gymnasium.spaces.Discrete(len(self._actions))
    self._game: vizdoom.DoomGame | None = None
    self._folder: tempfile.TemporaryDirectory | None = None
    self._scratch, self._instance_id = '', ''
    self._live = False
    self._start = 0  # The engine's clock at the episode's first frame, in tics.
    self._elapsed = 0  # Tics since then.
    self._screen: Any = None  # [120, 160, 3], the last live frame.

  def reset(
    self, *, seed: int | None = None, options: dict[str, Any] | None = None
  ) -> tuple[np.ndarray, dict[str, Any]]:
    """Starts an episode that depends on the seed alone."""
    super().reset(seed=seed)
    if seed is None:
      seed = int(self.np_random.integers(2**32))
    if self._game is None:
      self._game = self._start_engine()
      self._instance_id = self._game.get_instance_id()
    self._game.set_seed(seed % 2**32)
    self._game.new_episode()
    self._start, self._elapsed = self._game.get_episode_time(), 0
    self._live = True
    self._screen = self._game.get_state().screen_buffer
    return self._observe(), {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    """Holds the action's buttons down for `frameskip` tics, or those that remain to the limit.

    Raises:
      RuntimeError: no episode is running.
    """
    if self._game is None or not self._live:
      # A finished game would accept the action, do nothing and repeat its last reward.
      raise RuntimeError('step() without a running episode: call reset() first')
    tics = min(self._context.frameskip, self._limit - self._elapsed)
    reward = self._game.make_action(self._actions[action], tics)
    terminated = self._game.is_episode_finished()
    if terminated:
      tics = self._tics_to_end(self._game, tics)
    else:
      self._screen = self._game.get_state().screen_buffer
    self._elapsed += tics
    truncated = not terminated and self._elapsed >= self._limit
    self._live = not (terminated or truncated)
    return self._observe(), reward, terminated, truncated, {'tics': tics}

  def render(self) -> np.ndarray | None:  # pyright: ignore[reportIncompatibleMethodOverride]
    """Returns the last live frame as the engine drew it, [120, 160, 3] uint8."""
    if self.render_mode is None or self._screen is None:
      return None
    return self._screen.copy()

  def close(self) -> None:
    """Stops the engine; may be called again."""
    self._live = False
    if self._game is not None:
      self._game.close()
      self._game = None
      remove_engine(self._scratch, self._instance_id)  # One that crashed leaves its files.
    if self._folder is not None:
      self._folder.cleanup()
      self._folder = None

  def _observe(self) -> np.ndarray:
    return cv2.resize(self._screen, (WIDTH, HEIGHT), interpolation=cv2.INTER_NEAREST)

  def _tics_to_end(self, game: vizdoom.DoomGame, asked: int) -> int:
    tics = game.get_episode_time() - self._start - self._elapsed
    # A map's exit sets the engine's clock to 0: how far it got is lost, so all count as played.
    return tics if tics > 0 else asked

  def _start_engine(self) -> vizdoom.DoomGame:
    self._scratch = self._open_scratch()
    game = _configured_game(self._scenario, self._scratch)
    # The engine writes into its working directory, and takes any doom2.wad there for its own.
    with contextlib.chdir(self._scratch):
      game.init()
    return game

  def _open_scratch(self) -> str:
    if self._context.scratch is not None:
      return os.path.abspath(self._context.scratch)
    self._folder = tempfile.TemporaryDirectory(prefix='sfjax-doom-', ignore_cleanup_errors=True)
    return self._folder.name


def _check(context: EnvContext) -> None:
  problems = [
    f'Doom has no option {name!r}; it has time_limit (in tics)'
    for name in context.options
    if name != 'time_limit'
  ]
  limit = context.options.get('time_limit', 1)
  if not isinstance(limit, int) or limit < 1:
    problems.append(f'time_limit {limit!r} is not a number of tics from 1 up')
  if context.render_mode not in (None, 'rgb_array'):
    problems.append(f"Doom has no render mode {context.render_mode!r}; it has 'rgb_array'")
  if problems:
    raise ValueError('; '.join(problems))


def _configured_game(scenario: Scenario, scratch: str) -> vizdoom.DoomGame:
  game = vizdoom.DoomGame()
  game.load_config(os.path.join(vizdoom.scenarios_path, scenario.cfg))
  # Explicit paths: by default files of the working directory come first.
  package = os.path.dirname(vizdoom.__file__)
  game.set_vizdoom_path(write_launcher(scratch, os.path.join(package, 'vizdoom')))
  game.set_doom_game_path(os.path.join(package, scenario.iwad))
  game.set_doom_config_path(os.path.join(scratch, '_vizdoom.ini'))
  game.set_mode(vizdoom.Mode.PLAYER)
  game.set_available_buttons([getattr(vizdoom.Button, name) for name in scenario.buttons])
  game.set_episode_timeout(NO_TIMEOUT)
  game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
  game.set_screen_format(vizdoom.ScreenFormat.RGB24)
  game.set_render_hud(False)
  game.set_sound_enabled(False)
  game.set_window_visible(False)
  return game
