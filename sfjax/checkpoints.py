"""Checkpoints: what is saved, where, and how it comes back.

Written by the learner process with Orbax, which renames a finished step into place, so a step that
exists is complete. A step holds the state of every policy and the run's counters.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from sfjax.learner.update import LearnerState

FOLDER = 'checkpoints'


class Progress(NamedTuple):
  """Counters of a run, each with one entry a policy."""

  frames: list[int]
  samples: list[int]
  samples_dropped: list[int]


class Restored(NamedTuple):
  """What a checkpoint holds."""

  step: int
  states: list[LearnerState]
  progress: Progress


class Checkpoints:
  """The checkpoints of one run folder; a step is the number of updates over all policies."""

  def __init__(self, workdir: Path, *, keep: int | None = None) -> None:
    """Opens `workdir`/checkpoints.

    Args:
      workdir: the run folder.
      keep: how many newest steps to retain when saving; None: only read.
    """
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=keep is not None,
      enable_async_checkpointing=False,
      read_only=keep is None,
    )
    self._writes = keep is not None
    self._manager = ocp.CheckpointManager((workdir / FOLDER).resolve(), options=options)

  def steps(self) -> list[int]:
    """The complete steps, oldest first."""
    return sorted(self._manager.all_steps())

  def save(self, states: Sequence[LearnerState], progress: Progress) -> int:
    """Saves host copies of the states and returns the step; saving a step twice does nothing.

    Raises:
      OSError, ValueError: it could not be saved.
    """
    host = [jax.tree.map(np.asarray, state) for state in states]
    step = int(sum(state.version for state in host))
    if step not in self._manager.all_steps():
      saved = self._manager.save(
        step,
        args=ocp.args.Composite(
          states=ocp.args.StandardSave(host),  # pyright: ignore[reportCallIssue]
          progress=ocp.args.JsonSave(progress._asdict()),  # pyright: ignore[reportCallIssue]
        ),
      )
      if not saved:
        raise ValueError(f'step {step} is below the newest of {self.steps()}, which are kept')
    return step

  def restore(self, template: Sequence[LearnerState], step: int | None = None) -> Restored:
    """Restores a step, the newest readable one by default, into the structure of `template`.

    Raises:
      FileNotFoundError: there is no such step, or none is whole.
      ValueError: it is of another network.
    """
    steps = self.steps()
    if not steps or (step is not None and step not in steps):
      raise FileNotFoundError(
        f'no checkpoint {"" if step is None else step} in {self._manager.directory}; '
        f'there are {steps or "none"}'
      )
    candidates = steps[::-1] if step is None else [step]
    for i, candidate in enumerate(candidates):
      try:
        restored = self._read(candidate, template)
      except (KeyError, OSError, ValueError) as error:  # As in a run folder copied in part.
        print(f'checkpoint {candidate} cannot be read: {error!r}', flush=True)
        continue
      self._check_shapes(restored, template)
      self._set_aside(candidates[:i])
      return restored
    raise FileNotFoundError(f'no checkpoint of {candidates} in {self._manager.directory} is whole')

  def _check_shapes(self, restored: Restored, template: Sequence[LearnerState]) -> None:
    for old, new in zip(jax.tree.leaves(restored.states), jax.tree.leaves(template), strict=True):
      if old.shape != new.shape:
        raise ValueError(
          f'checkpoint {restored.step} in {self._manager.directory} is of another network: it has '
          f'an array of shape {old.shape} where the configuration has {new.shape}'
        )

  def _set_aside(self, damaged: list[int]) -> None:
    if not self._writes:
      return
    # The manager saves no step that is not above all there are.
    for step in damaged:
      folder = Path(self._manager.directory) / str(step)
      folder.rename(folder.with_name(f'damaged-{step}'))
    self._manager.reload()

  def _read(self, step: int, template: Sequence[LearnerState]) -> Restored:
    shapes = [jax.tree.map(_as_numpy, state) for state in template]
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        states=ocp.args.StandardRestore(shapes),  # pyright: ignore[reportCallIssue]
        progress=ocp.args.JsonRestore(),
      ),
    )
    return Restored(step, list(restored['states']), Progress(**restored['progress']))


def _as_numpy(leaf: Any) -> np.ndarray:
  # NumPy leaves restore on any machine, whatever devices wrote them.
  return np.zeros(leaf.shape, leaf.dtype)
