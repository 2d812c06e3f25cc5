"""`launch.py` against bad input: one clear message, exit code 2, and no traceback. And what stays
free of jax."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sfjax.config import Config, Encoder, to_dict
from tests.launching import environment, launch

ROOT = Path(__file__).parent.parent
DOOM, CARTPOLE = f'--config={ROOT}/configs/doom.py', f'--config={ROOT}/configs/cartpole.py'

BAD_INPUT = {
  'no configuration': ((), ['--mode=train needs --config=configs/<file>.py']),
  'no file': (
    ('--config=no/such.py',),
    ['--config=no/such.py: the file cannot be read: No such file or directory'],
  ),
  'no file to override': (
    ('--config=no/such.py', '--config.train.seed=1'),
    ['--config=no/such.py: the file cannot be read: No such file or directory'],
  ),
  'unknown fields': (
    (DOOM, '--config.train.sed=1', '--config.train.learning_rate=1', '--config.zzz=1'),
    [
      'no field train.sed; nearest: train.seed',
      'no field train.learning_rate; nearest: learner.learning_rate\n',
      'no field zzz',
    ],
  ),
  'wrong type': ((DOOM, '--config.train.seed=one'), ['flag --config.train.seed=one']),
  'unknown flag': ((DOOM, '--wokdir=run'), ["'wokdir'. Did you mean: workdir"]),
  'words': ((DOOM, 'train'), ["not understood: ['train']"]),
  'numbers that do not fit': (
    (DOOM, '--config.learner.batch_size=1000', '--config.loss.gamma=2'),
    [
      'learner.batch_size 1000 is not a multiple of learner.rollout 32; use 992 or 1024',
      'loss.gamma is 2.0; it must be between 0 and 1',
    ],
  ),
  'run folder is a file': ((CARTPOLE, '--workdir=file'), ['the run folder file cannot be written']),
  'below a file': ((CARTPOLE, '--workdir=file/run'), ['the run folder file/run cannot be written']),
  'another run': (
    (CARTPOLE, '--workdir=of_doom'),
    ['env.name is CartPole-v1; the run in of_doom has doom:basic', 'choose another --workdir'],
  ),
  'evaluation without a folder': (('--mode=eval',), ['--mode=eval needs the run folder']),
  'evaluation of no run': (
    ('--mode=eval', '--workdir=empty'),
    ['empty is not a run folder: it has no config.json'],
  ),
  'evaluation of a run that saved nothing': (
    ('--mode=eval', '--workdir=of_cartpole'),
    ['of_cartpole/checkpoints; there are none'],
  ),
  'evaluation of something else than a step': (
    ('--mode=eval', '--workdir=of_cartpole', '--checkpoint=best'),
    ["--checkpoint is best; it must be 'latest' or a step"],
  ),
}


@pytest.fixture
def folder(tmp_path) -> Path:
  (tmp_path / 'file').write_text('not a folder')
  (tmp_path / 'empty').mkdir()
  for name, env in (('of_doom', 'doom:basic'), ('of_cartpole', 'CartPole-v1')):
    config = Config()
    config.env.name = env
    config.model.encoder = Encoder.MLP
    (tmp_path / name).mkdir()
    (tmp_path / name / 'config.json').write_text(json.dumps(to_dict(config)))
  return tmp_path


@pytest.mark.parametrize('case', BAD_INPUT)
def test_bad_input_is_told_in_one_message(folder, case):
  """Catches a traceback, a wrong exit code, and a message that names neither value nor fix."""
  given, expected = BAD_INPUT[case]
  before = sorted(folder.rglob('*'))
  result = launch(*given, cwd=folder)
  assert result.returncode == 2, result.stdout
  assert 'Traceback' not in result.stdout
  for text in expected:
    assert result.stdout.count(text) == 1, result.stdout
  assert sorted(folder.rglob('*')) == before, 'bad input left something behind'


def test_nothing_of_what_workers_import_imports_jax():
  """Catches 140 MB and a GPU context in every worker."""
  modules = (
    'launch',
    'sfjax',
    'sfjax.actors.policy_mapping',
    'sfjax.actors.splits',
    'sfjax.actors.worker',
    'sfjax.allocation',
    'sfjax.config',
    'sfjax.entries',
    'sfjax.envs.registry',
    'sfjax.inference.batching',
    'sfjax.inference.server',
    'sfjax.machine',
    'sfjax.metrics.records',
    'sfjax.metrics.report',
    'sfjax.metrics.stages',
    'sfjax.runtime',
    'sfjax.shm.params',
    'sfjax.shm.queues',
    'sfjax.shm.slab',
    'sfjax.specs',
    'sfjax.training',
  )
  program = f"""
import importlib, sys
for module in {modules}:
  importlib.import_module(module)
  found = [name for name in ('jax', 'jaxlib', 'flax', 'optax', 'chex', 'orbax', 'torch')
           if name in sys.modules]
  if found:
    sys.exit(f'{{module}} imports {{found}}')
"""
  result = subprocess.run(
    [sys.executable, '-c', program],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert result.returncode == 0, result.stderr
