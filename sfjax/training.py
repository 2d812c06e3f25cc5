"""A training run from its configuration to its last line. Free of jax.

Checks everything before a process starts, keeps the run folder, and says how the run ended.
"""

import copy
import json
import multiprocessing
import os
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sfjax import entries
from sfjax.allocation import ChildDiedError, UnguardedScriptError, new_workdir
from sfjax.config import Config, check_types, resolve, validate
from sfjax.describe import set_by, table, with_automatic
from sfjax.fields import field_types, from_dict, to_dict
from sfjax.machine import check_platform, has_nvidia_device, usable_cpus
from sfjax.metrics.report import Report
from sfjax.provenance import provenance
from sfjax.runtime import Outcome, Runtime
from sfjax.serial import SerialRun

EXIT_CODES = {Outcome.SIGINT: 130, Outcome.SIGTERM: 143}  # As a shell reports them.
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

CONFIG_FILE = 'config.json'
FINISHED_FILE = 'finished.json'

# A folder's checkpoints fit only a run that has these fields in common with it.
_IDENTITY = ('env.name', 'env.kwargs', 'model.', 'train.num_policies')


def _resolve_here(config: Config) -> list[str]:
  cpus = usable_cpus()
  return resolve(config, cpus=cpus.count, cpus_reason=cpus.reason, accelerator=has_nvidia_device())


def prepare(config: Config) -> list[str]:
  """Resolves and checks a configuration.

  Returns:
    A line for every size chosen.

  Raises:
    ValueError: with every problem.
  """
  check_types(config)
  notes = _resolve_here(config)
  validate(config)
  return notes


def show(config: Config, *, flags: Collection[str] = ()) -> int:
  """Prints every field of a configuration, resolved, and what is wrong with it.

  Args:
    config: as it came from its file and the command line.
    flags: paths of the fields that the command line set.

  Returns:
    The exit code: 0, or 2 for a configuration that does not work.
  """
  try:
    check_types(config)
    given = copy.deepcopy(config)
    notes = _resolve_here(config)
    print(table(config, with_automatic(set_by(given, flags), given, config), notes), flush=True)
    validate(config)
  except ValueError as error:
    return bad_configuration(error)
  return 0


def bad_configuration(error: Exception) -> int:
  """Prints what is wrong with a configuration and returns the exit code."""
  problems = textwrap.indent(textwrap.dedent(str(error)), '  ')
  print(f'The configuration does not work:\n{problems}', file=sys.stderr, flush=True)
  return EXIT_BAD_INPUT


def train(config: Config, workdir: Path, *, flags: Collection[str] = ()) -> int:
  """Trains, or continues, the run in `workdir`.

  A script calls this under `if __name__ == '__main__':`, or is ended with exit code 2: every
  process of a run imports the script again.

  Args:
    config: changed in place where it leaves a value to the machine.
    workdir: the run folder.
    flags: paths of the fields that the command line set, to be kept with the configuration.

  Returns:
    The exit code: 0 a limit of the configuration was reached; 130 or 143 SIGINT or SIGTERM, after
    a clean stop; 1 a process was lost; 2 bad input.
  """
  if getattr(multiprocessing.current_process(), '_inheriting', False):
    os._exit(entries.EXIT_UNGUARDED)  # This is a child that imports its parent's script.
  try:
    check_types(config)
    given = copy.deepcopy(config)
    chosen = prepare(config)
    check_platform(serial=config.train.serial)
    with new_workdir(workdir):
      _check_same_run(config, workdir)
      finished = _finished(config, workdir)
      if finished:
        print(finished, flush=True)
        return 0
      runtime = (SerialRun if config.train.serial else Runtime)(config, workdir)
  except UnguardedScriptError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(EXIT_BAD_INPUT)  # Whatever else the script would do without its guard.
  except (ValueError, ImportError) as error:
    return bad_configuration(error)
  except (ChildDiedError, OSError) as error:
    print(f'The run could not start: {error}', file=sys.stderr, flush=True)
    return EXIT_FAILED
  record = {
    'config': to_dict(config),
    'set_by': with_automatic(set_by(given, flags), given, config),
    'provenance': provenance(),
  }
  _write_json(workdir / CONFIG_FILE, record)
  try:
    outcome = runtime.run(chosen)
  except ChildDiedError as error:
    print(f'The run failed: {error}. Checkpoints: {workdir}', file=sys.stderr, flush=True)
    return EXIT_FAILED
  _conclude(config, workdir, outcome, runtime.report, runtime.status)
  return EXIT_CODES.get(outcome, 0)


def load_config(workdir: Path) -> Config:
  """Reads the configuration of a run folder.

  Raises:
    ValueError: the folder is not one of a run of this version.
  """
  path = workdir / CONFIG_FILE
  if not path.is_file():
    raise ValueError(f'  {workdir} is not a run folder: it has no {CONFIG_FILE}')
  try:
    return from_dict(json.loads(path.read_text())['config'], Config)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'  {path} cannot be read as a configuration of this version ({error!r}); '
      f'choose another --workdir'
    ) from error


def _field(data: dict[str, Any], path: str) -> Any:
  for name in path.split('.'):
    data = data[name]
  return data


def _check_same_run(config: Config, workdir: Path) -> None:
  if not (workdir / CONFIG_FILE).is_file():
    return
  old, new = to_dict(load_config(workdir)), to_dict(config)
  problems = [
    f'  {path} is {_field(new, path)}; the run in {workdir} has {_field(old, path)}'
    for path in field_types(Config)
    if path.startswith(_IDENTITY) and _field(old, path) != _field(new, path)
  ]
  if problems:
    raise ValueError('\n'.join([*problems, '  choose another --workdir for another run']))


def _finished(config: Config, workdir: Path) -> str | None:
  """Says that the run has nothing left to do, if so."""
  path = workdir / FINISHED_FILE
  if not path.is_file():
    return None
  record = json.loads(path.read_text())
  train = config.train
  if record['frames'] >= train.max_frames:
    return (
      f'The run in {workdir} is finished: {record["frames"]:,} of {train.max_frames:,} frames. '
      f'Extend it with --config.train.max_frames={2 * train.max_frames}'
    )
  target, reached = train.stop_at_return, record['episode_return_mean']
  stopped = record['outcome'] == Outcome.STOP_AT_RETURN.value
  if stopped and target is not None and reached >= target:
    return (
      f'The run in {workdir} is finished: mean return {reached:.2f} reached '
      f'train.stop_at_return {target}. Extend it with a higher --config.train.stop_at_return'
    )
  return None


def _conclude(
  config: Config, workdir: Path, outcome: Outcome, report: Report, status: dict[str, Any]
) -> None:
  returns = [policy.return_mean for policy in report.policies]
  known = [value for value in returns if value is not None]
  record = {
    'outcome': outcome.value,
    'frames': int(status['frames'].min()),
    'episode_return_mean': min(known) if len(known) == len(returns) else None,
  }
  _write_json(workdir / FINISHED_FILE, record)
  score = ', '.join('no episode finished' if r is None else f'{r:.2f}' for r in returns)
  reason = {
    Outcome.MAX_FRAMES: f'train.max_frames {config.train.max_frames:,} reached',
    Outcome.MAX_SECONDS: f'train.max_seconds {config.train.max_seconds} reached',
    Outcome.STOP_AT_RETURN: f'train.stop_at_return {config.train.stop_at_return} reached',
  }.get(outcome, f'stopped by {outcome.value}')
  print(
    f'Finished: {reason}.\n'
    f'  folder    {workdir}\n'
    f'  score     mean return {score} (last {config.train.window} episodes, sampled actions)\n'
    f'  evaluate  python launch.py --mode=eval --workdir={workdir} --episodes=100\n'
    f'  continue  the same command again, with a higher --config.train.max_frames '
    f'({config.train.max_frames}) or another --config.train.stop_at_return '
    f'({config.train.stop_at_return})',
    flush=True,
  )


def _write_json(path: Path, data: dict[str, Any]) -> None:
  """Writes a file whole or not at all; a failure is told and never ends a run."""
  temporary = path.with_suffix('.tmp')
  try:
    temporary.write_text(json.dumps(data, indent=2) + '\n')
    os.replace(temporary, path)
  except OSError as error:
    print(f'{path}: not written: {error}', file=sys.stderr, flush=True)
