"""`launch.py` against bad input: one clear message, exit code 2, no traceback and nothing left
behind. And what stays free of jax."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

import launch as launcher
from sfjax import training
from sfjax.allocation import ChildDiedError
from sfjax.config import Config, Encoder
from sfjax.describe import set_by
from sfjax.fields import to_dict
from tests.launching import environment, launch

ROOT = Path(__file__).parent.parent
DOOM, CARTPOLE = f'--config={ROOT}/configs/doom.py', f'--config={ROOT}/configs/cartpole.py'

# What the configuration files of the bad cases hold, by name.
FILES = {
  'syntax.py': 'from sfjax.config import Config\n\ndef get_config(:\n',
  'name.py': 'from sfjax.config import Config\n\nseed = undefined\n',
  'key.py': 'def get_config():\n  return {}["missing"]\n',
  'field.py': (
    'from sfjax.config import Config\n\ndef get_config():\n  config = Config()\n'
    '  config.learner.batch = 3\n  return config\n'
  ),
  'typed.py': (
    'from sfjax.config import Config\n\ndef get_config():\n  config = Config()\n'
    '  config.learner.batch_size, config.model.core = "512", "gru"\n  return config\n'
  ),
  'argument.py': 'def get_config(scenario):\n  raise AssertionError\n',
  'nothing.py': 'config = 1\n',
  'number.py': 'def get_config():\n  return 3\n',
}

BAD_INPUT = {
  'no configuration': ((), ['--mode=train needs --config=configs/<file>.py']),
  'no file': (
    ('--config=no/such.py',),
    ['flag --config=no/such.py: the file cannot be read: No such file or directory'],
  ),
  'no file to override': (
    ('--config', 'no/such.py', '--config.train.seed=1'),
    ['flag --config=no/such.py: the file cannot be read: No such file or directory'],
  ),
  'a folder': (('--config=empty',), ['flag --config=empty: the file cannot be read: Is a dir']),
  'syntax': (
    ('--config=syntax.py',),
    ['flag --config=syntax.py: line 3: SyntaxError: invalid syntax\n'],
  ),
  'undefined name': (
    ('--config', 'name.py'),
    ["flag --config=name.py: line 3: NameError: name 'undefined' is not defined\n"],
  ),
  'key error of the file': (
    ('--config=key.py', '--config.train.seed=1'),
    ["flag --config=key.py: line 2: KeyError: 'missing'\n"],
  ),
  'unknown field in the file': (
    ('--config=field.py',),
    ["field.py: line 5: AttributeError: 'LearnerConfig' object has no attribute 'batch'\n"],
  ),
  'wrong types in the file': (
    ('--config=typed.py',),
    [
      "learner.batch_size is '512'; it must be an integer\n",
      "model.core is 'gru'; it must be Core.NONE or Core.GRU or Core.LSTM\n",
    ],
  ),
  'no function': (('--config=nothing.py',), ['nothing.py: it defines no function get_config()\n']),
  'no Config': (('--config=number.py',), ['get_config() returns int, not sfjax.config.Config\n']),
  'an argument too many': (
    (f'{CARTPOLE}:fast',),
    ['cartpole.py:fast: get_config() does not fit', '; leave :fast out\n'],
  ),
  'an argument too few': (
    ('--config=argument.py',),
    ['get_config(scenario) does not fit', 'add one after the path, as in file.py:argument\n'],
  ),
  'unknown fields': (
    (DOOM, '--config.train.sed=1', '--config.train.learning_rate=1', '--config.zzz=1'),
    [
      'no field train.sed; nearest: train.seed',
      'no field train.learning_rate; nearest: learner.learning_rate\n',
      'no field zzz',
    ],
  ),
  'a section': ((DOOM, '--config.train=1', '--noconfig.loss'), ['train; nearest', 'loss; nearest']),
  'an option by itself': (
    (DOOM, '--config.env.kwargs.width=3'),
    ["""given together, as JSON: --config.env.kwargs='{"width": …}'\n"""],
  ),
  'options that are no JSON': (
    (DOOM, '--config.env.kwargs=width'),
    ["""flag --config.env.kwargs=width: it must be JSON such as '{"width": 3}'\n"""],
  ),
  'no integer': (
    (DOOM, '--config.train.seed=one'),
    ['flag --config.train.seed=one: it must be an integer'],
  ),
  'no number': (
    (DOOM, '--config.loss.gamma=most'),
    ['flag --config.loss.gamma=most: it must be a number'],
  ),
  'no boolean': (
    (DOOM, '--config.loss.use_clip=perhaps'),
    ['flag --config.loss.use_clip=perhaps: it must be True or False\n'],
  ),
  'no choice': (
    (DOOM, '--config.model.core=rnn'),
    ['flag --config.model.core=rnn: value should be one of <none|gru|lstm>\n'],
  ),
  'nothing automatic': (
    (DOOM, '--config.train.seed=None'),
    ['train.seed is None; it must be an integer\n'],
  ),
  'unknown flag': ((DOOM, '--wokdir=run'), ["'wokdir'. Did you mean: workdir"]),
  'unknown mode': (('--mode=walk', DOOM), ['should be one of <train|eval|bench|config>\n']),
  'words': ((DOOM, 'train'), ["not understood: ['train']"]),
  'numbers that do not fit': (
    (
      DOOM,
      '--config.learner.batch_size=1000',
      '--config.loss.gamma=2',
      '--config.sampler.envs_per_worker=5',
      '--config.learner.epochs=0',
      '--config.train.max_frames=-1',
    ),
    [
      'learner.batch_size 1000 is not a multiple of learner.rollout 32; use 992 or 1024\n',
      'loss.gamma is 2.0; it must be between 0 and 1\n',
      'sampler.envs_per_worker 5 is not a multiple of sampler.num_splits 2; use 4 or 6\n',
      'learner.epochs is 0; it must be above 0\n',
      'train.max_frames is -1; it must be above 0\n',
    ],
  ),
  'numbers that do not fit in a benchmark': (
    ('--mode=bench', DOOM, '--config.learner.batch_size=1000'),
    ['learner.batch_size 1000 is not a multiple of learner.rollout 32; use 992 or 1024\n'],
  ),
  'unknown scenario': (
    (f'{DOOM}:defend_center', '--workdir=new/run'),
    ["no Doom scenario 'doom:defend_center'; nearest: doom:defend_the_center"],
  ),
  'unknown environment in one process': (
    (CARTPOLE, '--config.env.name=CartPole-v9', '--config.train.serial'),
    ["no environment 'CartPole-v9'; nearest: CartPole-v"],
  ),
  'unknown scenario in a benchmark': (
    ('--mode=bench', f'{DOOM}:basik'),
    ["no Doom scenario 'doom:basik'; nearest: doom:basic\n"],
  ),
  'unknown option of the environment': (
    (CARTPOLE, '--config.env.kwargs={"width": 3}', '--config.train.serial'),
    ["got an unexpected keyword argument 'width'"],
  ),
  'more than fits the memory': (
    (CARTPOLE, '--config.sampler.envs_per_worker=200000000', '--config.train.serial'),
    [
      ' GiB can be had (',
      'sampler.num_envs or envs_per_worker (',
      'sampler.rows_per_stream (2), learner.rollout (32) or learner.batch_size (1024)\n',
    ],
  ),
  'run folder is a file': ((CARTPOLE, '--workdir=file'), ['the run folder file cannot be written']),
  'below a file': (
    (CARTPOLE, '--workdir=file/a/run'),
    ['the run folder file/a/run cannot be written (Not a directory); choose another --workdir\n'],
  ),
  'another run': (
    (CARTPOLE, '--workdir=of_doom'),
    ['env.name is CartPole-v1; the run in of_doom has doom:basic', 'choose another --workdir'],
  ),
  'another network and options': (
    (CARTPOLE, '--workdir=of_cartpole', '--config.env.kwargs={"a": 1}'),
    [
      "env.kwargs is {'a': 1}; the run in of_cartpole has {}\n",
      'model.core is none; the run in of_cartpole has gru\n',
    ],
  ),
  'a run folder of another version': (
    (CARTPOLE, '--workdir=of_old'),
    ["of_old/config.json cannot be read as a configuration of this version (KeyError('config'))"],
  ),
  'evaluation without a folder': (('--mode=eval',), ['--mode=eval needs the run folder']),
  'evaluation of no run': (
    ('--mode=eval', '--workdir=empty'),
    ['empty is not a run folder: it has no config.json'],
  ),
  'evaluation of a damaged run': (
    ('--mode=eval', '--workdir=of_old'),
    ['of_old/config.json cannot be read as a configuration of this version'],
  ),
  'evaluation of a run that saved nothing': (
    ('--mode=eval', '--workdir=of_cartpole'),
    ['of_cartpole/checkpoints; there are none'],
  ),
  'evaluation of something else than a step': (
    ('--mode=eval', '--workdir=of_cartpole', '--checkpoint=best'),
    ["--checkpoint is best; it must be 'latest' or a step"],
  ),
  'no episodes': (
    ('--mode=eval', '--workdir=of_cartpole', '--episodes=0'),
    ['flag --episodes=0: 0 is not a positive integer\n'],
  ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
  """The working folder of a user, who has a folder for scratch in it."""
  (tmp_path / 'file').write_text('not a folder')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'tmp').mkdir()
  for name, text in FILES.items():
    (tmp_path / name).write_text(text)
  for name, env in (('of_doom', 'doom:basic'), ('of_cartpole', 'CartPole-v1')):
    config = Config()
    config.env.name = env
    config.model.encoder = Encoder.MLP
    (tmp_path / name).mkdir()
    (tmp_path / name / 'config.json').write_text(json.dumps({'config': to_dict(config)}))
  (tmp_path / 'of_old').mkdir()
  (tmp_path / 'of_old' / 'config.json').write_text(json.dumps(to_dict(Config())))
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('TMPDIR', str(tmp_path / 'tmp'))
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'tmp'))
  return tmp_path


def check_refused(given: tuple[str, ...], expected: list[str], capfd) -> None:
  """Runs `launch.py` in this process and looks at what it says and leaves."""
  resource_tracker.ensure_running()  # It stays, and is not of the run.
  files, children = sorted(Path().rglob('*')), psutil.Process().children(recursive=True)
  code = launcher.main(['launch.py', *given])
  printed = capfd.readouterr()
  assert code == 2, printed
  assert 'Traceback' not in printed.err and printed.out == ''
  for text in expected:
    assert printed.err.count(text) == 1, printed.err
  assert sorted(Path().rglob('*')) == files, 'bad input left something behind'
  assert psutil.Process().children(recursive=True) == children


@pytest.mark.parametrize('case', BAD_INPUT)
def test_bad_input_is_told_in_one_message(folder, capfd, case):
  """Catches a traceback, a wrong exit code, a message without value or fix, and leftovers."""
  given, expected = BAD_INPUT[case]
  check_refused(given, expected, capfd)


def test_a_value_that_a_script_cannot_give_is_told(folder, capfd):
  """Catches a traceback for what no file can keep: not every value can be copied."""
  config = Config()
  config.env.kwargs = {'lock': threading.Lock()}
  assert training.train(config, Path('new')) == 2
  assert 'it must be a dictionary of texts to JSON values' in capfd.readouterr().err
  assert not Path('new').exists()


def test_the_command_ends_as_its_message_says(folder):
  """Catches an exit code that does not reach the shell, and a traceback around `main`."""
  result = launch('--config=name.py', cwd=folder)
  assert result.returncode == 2
  assert result.stdout.startswith('flag --config=name.py: line 3: NameError')
  assert 'Traceback' not in result.stdout
  result = launch('-h', cwd=folder)
  assert result.returncode == 0
  assert result.stdout == launcher.USAGE


def test_a_missing_simulator_is_told_with_its_fix(folder, capfd, monkeypatch):
  """Catches a traceback of an import that fails, in training and in evaluation."""
  (folder / 'vizdoom').mkdir()
  (folder / 'vizdoom' / '__init__.py').write_text('raise ImportError("no vizdoom here")\n')
  monkeypatch.syspath_prepend(str(folder))  # Spawned processes get it, too.
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  monkeypatch.setenv('PYTHONDONTWRITEBYTECODE', '1')
  for name in ('vizdoom', 'sfjax.envs.doom.env'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  expected = ["doom:basic needs ViZDoom: pip install 'sfjax[doom]' (no vizdoom here)\n"]
  check_refused((DOOM,), expected, capfd)
  check_refused(('--mode=eval', '--workdir=of_doom'), expected, capfd)


@pytest.mark.parametrize(
  'platform, fix', (('darwin', 'add --config.train.serial'), ('win32', 'WSL'))
)
def test_a_system_that_cannot_run_is_told(folder, capfd, monkeypatch, platform, fix):
  """Catches processes that are started before the first call fails which the system lacks."""
  monkeypatch.setattr(sys, 'platform', platform)
  check_refused((CARTPOLE,), [fix], capfd)
  check_refused(('--mode=bench', CARTPOLE), [fix], capfd)


UNGUARDED = """
import sys
from pathlib import Path

from sfjax.config import Config, Core, Encoder
from sfjax.training import train

config = Config()
config.env.name = 'CartPole-v1'
config.model.encoder = Encoder.MLP
config.train.serial = len(sys.argv) > 1
train(config, Path('runs/new'))
print('goes on')
"""


@pytest.mark.parametrize('serial', (False, True))
def test_a_script_without_its_guard_is_told(folder, serial):
  """Catches the traceback of every child that trains again, and a scratch folder that stays."""
  (folder / 'script.py').write_text(UNGUARDED)
  before = sorted(folder.rglob('*'))
  result = subprocess.run(
    [sys.executable, 'script.py', *(['serial'] if serial else [])],
    env={**environment(), 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert result.returncode == 2, result.stderr
  assert result.stdout == ''
  assert result.stderr == (
    'script.py would train in every process of the run, since each imports it again; put what it '
    "does under `if __name__ == '__main__':`\n"
  )
  assert sorted(folder.rglob('*')) == before
  of_folder = [p for p in psutil.process_iter(['cwd']) if p.info['cwd'] == str(folder)]
  assert [p for p in of_folder if p.pid != os.getpid()] == []


class LostRun:
  """A run that starts, and is lost at once."""

  def __init__(self, config: Config, workdir: Path) -> None:
    assert workdir.is_dir()
    assert config.train.serial

  def run(self, notes: list[str]) -> None:
    raise ChildDiedError(f'a test ended it, {len(notes)} notes')


def test_the_run_folder_keeps_configuration_sources_and_code(folder, capfd, monkeypatch):
  """Catches a run whose settings cannot be told from the defaults, or whose code is unknown."""
  monkeypatch.setattr(training, 'SerialRun', LostRun)
  given = ('--config.train.serial', '--config.train.seed=0', '--config.sampler.num_workers=None')
  assert launcher.main(['launch.py', CARTPOLE, '--workdir=runs/new', *given]) == 1
  assert 'The run failed: a test ended it' in capfd.readouterr().err
  record = json.loads(Path('runs/new/config.json').read_text())
  assert sorted(record) == ['config', 'provenance', 'set_by']
  assert record['config']['sampler']['num_workers'] >= 1
  assert list(record['set_by']) == list(set_by(Config(), ()))
  expected = {
    'loss.gamma': 'default',
    'env.name': 'file',
    'train.seed': 'flag',
    'train.serial': 'flag',
    'sampler.num_workers': 'automatic',
    'sampler.decorrelation_steps': 'automatic',
  }
  assert {path: record['set_by'][path] for path in expected} == expected
  assert {'commit', 'diff', 'untracked', 'argv', 'python', 'packages'} == set(record['provenance'])


def test_nothing_of_what_workers_import_imports_jax():
  """Catches 140 MB and a GPU context in every worker."""
  modules = (
    'launch',
    'sfjax',
    'sfjax.actors.policy_mapping',
    'sfjax.actors.splits',
    'sfjax.actors.worker',
    'sfjax.allocation',
    'sfjax.command_line',
    'sfjax.config',
    'sfjax.describe',
    'sfjax.entries',
    'sfjax.envs.registry',
    'sfjax.fields',
    'sfjax.inference.batching',
    'sfjax.inference.server',
    'sfjax.machine',
    'sfjax.metrics.records',
    'sfjax.metrics.report',
    'sfjax.metrics.stages',
    'sfjax.provenance',
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
