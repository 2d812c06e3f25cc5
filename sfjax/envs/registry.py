"""Makes an environment from its name, for workers, evaluation and benchmarks alike.

Importing this loads neither a simulator nor Gymnasium: that happens when an environment is made.

Every environment that comes from here keeps one contract:
- `reset(seed=...)` starts an episode that this seed alone determines;
- `step` returns plain `float` and `bool` values, and `info['tics']`, what the simulator advanced;
- when an episode is truncated, the observation is the true final one;
- nothing resets by itself; `close` may be called twice.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sfjax.envs.doom.scenarios import SCENARIOS, Scenario

if TYPE_CHECKING:
  import gymnasium

DOOM_PREFIX = 'doom:'
NULL_PIXELS = 'null:pixels'
RECALL = 'recall'


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvContext:
  """What an environment may know about its place in the run."""

  worker: int = 0
  split: int = 0
  index: int = 0  # Within the worker.
  env_id: int = 0  # Unique in the run.
  seed: int = 0  # Of the run.
  frameskip: int = 1
  render_mode: str | None = None
  options: Mapping[str, Any] = field(default_factory=dict)  # From `config.env.kwargs`.
  scratch: str | None = None  # A folder of its own that the environment may write to.


def make_env(name: str, context: EnvContext) -> 'gymnasium.Env':
  """Makes an environment that keeps the contract of this module.

  Args:
    name: `doom:<scenario>`, `recall`, `null:pixels`, or the id of a registered Gymnasium one.
    context: its place in the run; `options` are keyword arguments of the environment.

  Raises:
    ValueError: there is no such environment (the nearest names follow), or it refuses an option.
    ImportError: a package that it needs is missing; the message names what to install.
  """
  if name.startswith(DOOM_PREFIX):
    return _make_doom(name, context)
  if name == NULL_PIXELS:
    from sfjax.envs.null import NullEnv

    return NullEnv(context)
  if name == RECALL:
    from sfjax.envs.recall import RecallEnv

    return RecallEnv(context)
  return _make_gymnasium(name, context)


def _make_doom(name: str, context: EnvContext) -> 'gymnasium.Env':
  scenario = _find_scenario(name)
  try:
    from sfjax.envs.doom.env import DoomEnv
  except ImportError as error:
    raise ImportError(f"{name} needs ViZDoom: pip install 'sfjax[doom]' ({error})") from error
  return DoomEnv(scenario, context)


def _find_scenario(name: str) -> Scenario:
  scenario = SCENARIOS.get(name.removeprefix(DOOM_PREFIX))
  if scenario is None:
    known = [DOOM_PREFIX + scenario for scenario in SCENARIOS]
    raise ValueError(f'no Doom scenario {name!r}; {_nearest(name, known)}')
  return scenario


def _make_gymnasium(name: str, context: EnvContext) -> 'gymnasium.Env':
  import gymnasium

  from sfjax.envs.gymnasium_adapter import GymnasiumAdapter

  try:
    env = gymnasium.make(name, render_mode=context.render_mode, **context.options)
  except gymnasium.error.DependencyNotInstalled as error:
    raise ImportError(f'{name}: {error}') from error
  except gymnasium.error.UnregisteredEnv as error:
    raise _unknown_id(name) from error
  except ModuleNotFoundError as error:
    if ':' not in name:  # <module>:<id> has Gymnasium import the module first.
      raise
    raise _unknown_id(name) from error
  except (gymnasium.error.Error, TypeError) as error:  # TypeError: an option it does not know.
    raise ValueError(f'{name}: {error}') from error
  return GymnasiumAdapter(env, frameskip=context.frameskip)


def _unknown_id(name: str) -> ValueError:
  import gymnasium

  known = [
    NULL_PIXELS,
    RECALL,
    *(DOOM_PREFIX + scenario for scenario in SCENARIOS),
    *gymnasium.registry,
  ]
  return ValueError(f'no environment {name!r}; {_nearest(name, known)}')


def _nearest(name: str, known: Iterable[str]) -> str:
  # A name in the wrong case is as near as can be, which difflib alone does not see.
  names = {candidate.lower(): candidate for candidate in known}
  near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
  if near:
    return f'nearest: {", ".join(names[key] for key in near)}'
  return f'{len(names)} are known, among them {", ".join(list(names.values())[:5])}'
