"""Makes environments by name, all under one contract.

`reset(seed=...)` starts an episode that this seed alone determines; `step` returns the observation,
a float reward, `terminated`, `truncated`, and an `info` with `tics`, what the simulator advanced.
At a truncation the observation is the true final one. Nothing resets itself. `close` may be called
twice. Importing this module imports no simulator.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import gymnasium


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvContext:
  """Who an environment is and what it may use."""

  worker: int = 0
  split: int = 0
  index: int = 0  # Within the worker.
  env_id: int = 0  # Unique in the run.
  seed: int = 0
  frameskip: int = 1
  render_mode: str | None = None
  options: Mapping[str, Any] = field(default_factory=dict)
  scratch: str | None = None  # A folder this environment may write to.


def make_env(name: str, context: EnvContext) -> 'gymnasium.Env':
  """Makes an environment.

  Args:
    name: `doom:<scenario>`, `null:pixels`, or the id of a registered Gymnasium environment.
    context: who it is.

  Raises:
    ValueError: there is no such environment; the message names the nearest.
    ImportError: a package that it needs is not installed; the message says how to.
  """
  kind, _, rest = name.partition(':')
  if kind == 'doom':
    from sfjax.envs.doom.scenarios import SCENARIOS

    if rest not in SCENARIOS:
      raise ValueError(f'  there is no Doom scenario {rest!r}; {nearest(rest, SCENARIOS)}')
    from sfjax.envs.doom.env import DoomEnv

    return DoomEnv(SCENARIOS[rest], context)
  if name == 'null:pixels':
    from sfjax.envs.null import NullEnv

    return NullEnv(context)
  return _make_gymnasium(name, context)


def nearest(name: str, known: Mapping[str, Any]) -> str:
  """Says which of the known names come nearest to `name`."""
  close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
  return f'the nearest are {", ".join(close)}' if close else f'there are {", ".join(known)}'


def _make_gymnasium(name: str, context: EnvContext) -> 'gymnasium.Env':
  import gymnasium

  from sfjax.envs.gymnasium_adapter import FrameSkip

  if name not in gymnasium.registry:
    raise ValueError(
      f'  there is no Gymnasium environment {name!r}; {nearest(name, gymnasium.registry)}'
    )
  env = gymnasium.make(name, render_mode=context.render_mode, **context.options)
  return FrameSkip(env, context.frameskip)
