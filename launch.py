"""Trains, evaluates, measures or describes: `python launch.py --config=configs/doom.py`.

Free of jax at import: spawned processes import this module again.
"""

import sys
from pathlib import Path
from typing import Any

from sfjax.machine import check_platform

USAGE = """sfjax: asynchronous PPO on one machine.

  train     python launch.py --config=configs/doom.py[:scenario] [--workdir=runs/name]
  evaluate  python launch.py --mode=eval --workdir=runs/doom_basic [--episodes=100]
            [--deterministic] [--checkpoint=<updates>]
  measure   python launch.py --mode=bench --config=configs/doom.py
  describe  python launch.py --mode=config --config=configs/doom.py

Every field of a configuration is a flag, --mode=config lists them all:
  --config.train.max_frames=1000000     --config.sampler.num_workers=None (automatic)
  --config.model.mlp_layers=64,64       --config.env.kwargs='{"time_limit": 700}'
"""


def _parse(argv: list[str]) -> Any:
  """Returns the values of the flags.

  Raises:
    ValueError: with what is wrong.
  """
  from absl import flags

  from sfjax.command_line import define_config

  values = flags.FlagValues()
  modes = ['train', 'eval', 'bench', 'config']
  flags.DEFINE_enum('mode', 'train', modes, 'What to do.', flag_values=values)
  flags.DEFINE_string('workdir', None, 'Run folder.', flag_values=values)
  flags.DEFINE_integer(
    'episodes', 100, 'eval: episodes to play.', lower_bound=1, flag_values=values
  )
  flags.DEFINE_bool('deterministic', False, 'eval: take the likeliest action.', flag_values=values)
  flags.DEFINE_string('checkpoint', 'latest', "eval: 'latest' or a step.", flag_values=values)
  try:
    define_config(values, argv)
    rest = values(argv)
  except flags.Error as error:
    raise ValueError(str(error)) from error
  if len(rest) > 1:
    raise ValueError(f'not understood: {rest[1:]}')
  return values


def _bad_input(text: str) -> int:
  print(text, file=sys.stderr, flush=True)
  return 2


def main(argv: list[str]) -> int:
  """Parses the flags, runs the mode and returns the exit code."""
  if {'-h', '-help', '--help'} & set(argv[1:]):
    print(USAGE, end='')
    return 0
  try:
    check_platform(serial=True)  # Before the imports: Windows has not all that they need.
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
  if not values['config'].present:
    return _bad_input(f'--mode={values.mode} needs --config=configs/<file>.py\n\n{USAGE}')
  if values.mode == 'bench':
    from sfjax.bench import bench

    return bench(values.config)
  from sfjax.command_line import fields_given
  from sfjax.training import show, train

  given = fields_given(values)
  if values.mode == 'config':
    return show(values.config, flags=given)
  workdir = Path(values.workdir or f'runs/{values.config.name}')
  return train(values.config, workdir, flags=given)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
