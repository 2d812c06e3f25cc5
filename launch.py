"""Trains, evaluates or measures: `python launch.py --config=configs/doom.py`.

Free of jax at import: spawned processes import this module again.
"""

import sys
from pathlib import Path

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


def main(argv: list[str]) -> int:
  """Parses the flags, runs the mode and returns the exit code."""
  from absl import flags

  _define_flags()
  try:
    rest = flags.FLAGS(argv)
  except (flags.Error, KeyError, ValueError, OSError) as error:
    return _bad_input(f'{error.args[0] if error.args else error}\n\n{USAGE}')
  if len(rest) > 1:
    return _bad_input(f'not understood: {rest[1:]}\n\n{USAGE}')
  values = flags.FLAGS
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
