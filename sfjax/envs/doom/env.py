"""One Gymnasium environment for every Doom scenario, straight over the engine.

The time limit is ours: the engine has no frame to show once its own limit has ended an episode, so
that one is off, and at ours the game is still live and its frame is the true final observation.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from sfjax.envs.doom.leftovers import MARKER
from sfjax.envs.doom.scenarios import Scenario
from sfjax.envs.registry import EnvContext

try:
  import cv2
  import vizdoom
except ImportError as error:
  raise ImportError(f"  Doom needs pip install 'sfjax[doom]' ({error})") from error

HEIGHT, WIDTH = 72, 128

cv2.setNumThreads(0)  # In the calling thread: a worker has one CPU.

# An engine ends with the process that owns it, also when that is killed.
_WRAPPER = """#!/bin/sh
exec setpriv --pdeathsig KILL "{engine}" "$@"
"""


class DoomEnv(gymnasium.Env):
  """A Doom scenario: 72 × 128 RGB frames, one discrete action out of the scenario's.

  The frame is the engine's 160 × 120 one, nearest neighbours. At a real end the engine has no frame
  either; the last live one stands in, which no learner reads.
  """

  metadata = {'render_modes': ['rgb_array'], 'render_fps': 35}

  def __init__(self, scenario: Scenario, context: EnvContext) -> None:
    """Prepares the environment; the engine starts with the first `reset`."""
    self.observation_space = gymnasium.spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    self.action_space = gymnasium.spaces.Discrete(len(scenario.actions))
    self.render_mode = context.render_mode
    self._scenario = scenario
    self._frameskip = context.frameskip
    self._buttons = [[button in held for button in scenario.buttons] for held in scenario.actions]
    self._scratch = context.scratch
    self._own_scratch: str | None = None
    self._game: vizdoom.DoomGame | None = None
    self._marker: Path | None = None
    self._tics_left = 0
    self._screen = np.zeros((120, 160, 3), np.uint8)

  def reset(
    self, *, seed: int | None = None, options: dict[str, Any] | None = None
  ) -> tuple[np.ndarray, dict[str, Any]]:
    """Starts an episode; with a seed, the one that belongs to it."""
    super().reset(seed=seed)
    del options
    if self._game is None:
      self._game = self._start_engine()
    game_seed = int(self.np_random.integers(2**32)) if seed is None else seed % 2**32
    self._game.set_seed(game_seed)
    self._game.new_episode()
    self._tics_left = self._scenario.time_limit_tics
    return self._observe(self._game), {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    """Holds the action's buttons for `frameskip` tics, or for what is left of the time.

    Raises:
      RuntimeError: the episode is over, or none was started.
    """
    game = self._game
    if game is None or not self._tics_left:
      raise RuntimeError('no episode is under way: call reset first')
    before = game.get_episode_time()
    tics = min(self._frameskip, self._tics_left)
    reward = game.make_action(self._buttons[action], tics)
    terminated = game.is_episode_finished()
    if terminated:
      self._tics_left = 0
      tics = min(tics, game.get_episode_time() - before)
    else:
      self._tics_left -= tics
    truncated = not terminated and not self._tics_left
    obs = self._resize() if terminated else self._observe(game)
    return obs, reward, terminated, truncated, {'tics': tics}

  def render(self) -> np.ndarray | None:
    """Returns the last whole frame, [120, 160, 3], in the mode rgb_array."""
    return self._screen if self.render_mode == 'rgb_array' else None

  def close(self) -> None:
    """Ends the engine and removes what it wrote."""
    if self._game is not None:
      self._game.close()
      self._game = None
    if self._marker is not None:
      self._marker.unlink(missing_ok=True)
      self._marker = None
    if self._own_scratch is not None:
      shutil.rmtree(self._own_scratch, ignore_errors=True)
      self._own_scratch = None

  def _observe(self, game: vizdoom.DoomGame) -> np.ndarray:
    self._screen = game.get_state().screen_buffer  # A fresh array every time.
    return self._resize()

  def _resize(self) -> np.ndarray:
    return cv2.resize(self._screen, (WIDTH, HEIGHT), interpolation=cv2.INTER_NEAREST)

  def _start_engine(self) -> vizdoom.DoomGame:
    if self._scratch is None:
      self._own_scratch = tempfile.mkdtemp(prefix='sfjax-doom-')
    scratch = Path(self._own_scratch or self._scratch or '.').resolve()
    game = vizdoom.DoomGame()
    folder = Path(vizdoom.__file__).parent
    game.load_config(str(Path(vizdoom.scenarios_path) / self._scenario.config))
    game.set_vizdoom_path(str(_write_wrapper(scratch, folder / 'vizdoom')))
    game.set_doom_game_path(str(folder / 'freedoom2.wad'))
    game.set_doom_config_path(str(scratch / '_vizdoom.ini'))
    game.set_available_buttons([getattr(vizdoom.Button, name) for name in self._scenario.buttons])
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_render_hud(False)
    game.set_sound_enabled(False)
    game.set_window_visible(False)
    game.set_episode_timeout(0)
    here = os.getcwd()
    os.chdir(scratch)  # The engine writes to its working directory, and reads games from it.
    try:
      game.init()
    finally:
      os.chdir(here)
    self._marker = scratch / f'{MARKER}{game.get_instance_id()}'
    self._marker.touch()
    return game


def _write_wrapper(scratch: Path, engine: Path) -> Path:
  path = scratch / 'engine.sh'
  path.write_text(_WRAPPER.format(engine=engine))
  path.chmod(0o755)
  return path
