"""Trains, evaluates or measures: `python launch.py --config=configs/doom.py`.

Free of jax at import: spawned processes import this module again.
"""

import difflib
import errno
import os
import sys
from pathlib import Path
from typing import Any

USAGE = """sfjax: asynchronous PPO on one machine.

  train     python launch.py --config=configs/doom.py[:scenario] [--workdir=runs/name]
  evaluate  python launch.py --mode=eval --workdir=runs/doom_basic --episodes=100
  measure   python launch.py --mode=bench --config=configs/doom.py

Every field of a configuration is a flag: --config.train.max_frames=1000000
"""


def _define_flags() -> None:
  from absl import flags
  from ml_collections import config_flags

  config_flags.DEFINE_config_file(
    'config', None, 'Configuration file, with :argument if it has one.'
  )
  flags.DEFINE_enum('mode', 'train', ['train', 'eval', 'bench'], 'What to do.')
  flags.DEFINE_string('workdir', None, 'Run folder; default runs/<name of the configuration>.')
  flags.DEFINE_integer('episodes', 100, 'eval: episodes to play.', lower_bound=1)
  flags.DEFINE_bool('deterministic', False, 'eval: take the likeliest action instead of sampling.')
  flags.DEFINE_string('checkpoint', 'latest', "eval: 'latest' or a step.")


def _bad_input(text: str) -> int:
  print(text, file=sys.stderr, flush=True)
  return 2


def _unknown_fields(argv: list[str]) -> list[str]:
  """A line for each flag that names no field of a configuration, with the nearest that do."""
  from sfjax.config import field_paths

  known, problems = field_paths(), []
  for flag in argv[1:]:
    path = flag.partition('=')[0].lstrip('-').removeprefix('config.')
    if '.' not in flag.partition('=')[0] or path in known:
      continue
    same_name = [other for other in known if other.endswith(f'.{path.rpartition(".")[2]}')]
    near = same_name or difflib.get_close_matches(path, known, cutoff=0.5)
    nearest = f'; nearest: {", ".join(near)}' if near else ''
    problems.append(f'a configuration has no field {path}{nearest}')
  return problems


def _parse(argv: list[str]) -> Any:
  """Returns the values of the flags.

  Raises:
    ValueError: with what is wrong.
  """
  from absl import flags

  _define_flags()
  values = flags.FLAGS
  try:
    rest = values(argv)
    if values.config is not None:
      values.config.name  # noqa: B018 - a file that could not be read shows at its first use.
  except KeyError as error:
    problems = _unknown_fields(argv)
    if not problems:
      raise  # It is the configuration file's own.
    raise ValueError('\n'.join(problems)) from error
  except OSError as error:
    flag = next(flag for flag in argv if flag.lstrip('-').partition('=')[0] == 'config')
    reason = os.strerror(getattr(error.__cause__ or error, 'errno', None) or errno.ENOENT)
    raise ValueError(f'{flag}: the file cannot be read: {reason}') from error
  except flags.Error as error:
    raise ValueError(str(error)) from error
  if len(rest) > 1:
    raise ValueError(f'not understood: {rest[1:]}')
  return values


def main(argv: list[str]) -> int:
  """Parses the flags, runs the mode and returns the exit code."""
  try:
    values = _parse(argv)
  except ValueError as error:
    return _bad_input(f'{error}\n\n{USAGE}')
  if values.mode == 'eval':
    if values.workdir is None:
      return _bad_input(f'--mode=eval needs the run folder: --workdir=runs/<name>\n\n{USAGE}')
    from sfjax.evaluation import evaluate

    return evaluate(
      Path(values.workdir),
      episodes=values.episodes,
      deterministic=values.deterministic,
      checkpoint=values.checkpoint,
    )
  if values.config is None:
    return _bad_input(f'--mode={values.mode} needs --config=configs/<file>.py\n\n{USAGE}')
  if values.mode == 'bench':
    from sfjax.bench import bench

    return bench(values.config)
  from sfjax.training import train

  return train(values.config, Path(values.workdir or f'runs/{values.config.name}'))


if __name__ == '__main__':
  sys.exit(main(sys.argv))
