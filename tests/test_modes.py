"""Serial and synchronous runs, and the presets that the switches of the update make."""

import hashlib
from pathlib import Path

import pytest

from tests.launching import launch, metrics, scratch_folders

ROOT = Path(__file__).parent.parent
CONFIG = f'--config={ROOT}/configs/cartpole.py'
SOLVE = ('--config.train.max_seconds=90', '--config.train.stop_at_return=475')

PRESETS = {
  'normalised': ('--config.model.normalize_obs=obs', '--config.model.normalize_returns'),
  'IMPALA': ('--config.loss.use_clip=False', '--config.learner.epochs=1'),
  'PPO': (
    '--config.loss.use_vtrace=False',
    '--config.train.synchronous',
    '--config.learner.epochs=4',
  ),
  'A2C': (
    '--config.loss.use_vtrace=False',
    '--config.loss.use_clip=False',
    '--config.train.synchronous',
    '--config.learner.epochs=1',
    '--config.learner.batch_size=512',
  ),
}


def parameter_hash(workdir: Path) -> str:
  import jax

  from sfjax.checkpoints import Checkpoints
  from sfjax.learner.setup import initial_states
  from sfjax.specs import EnvSpec, array_spec, discrete
  from sfjax.training import load_config

  spec = EnvSpec({'obs': array_spec('float32', 4)}, discrete(2))
  restored = Checkpoints(workdir).restore(initial_states(load_config(workdir), spec))
  leaves = jax.tree.leaves(restored.states[0])
  return hashlib.sha256(b''.join(leaf.tobytes() for leaf in leaves)).hexdigest()


def test_a_serial_run_depends_on_its_seed_alone(tmp_path):
  """Fails when noise comes from the order of calls, from time, or from an unseeded generator."""
  hashes = []
  for name, seed in (('a', 0), ('b', 0), ('c', 1)):
    result = launch(
      CONFIG,
      '--config.train.serial',
      f'--config.train.seed={seed}',
      '--config.train.max_frames=8000',
      '--config.sampler.envs_per_worker=8',
      f'--workdir={name}',
      cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout
    hashes.append(parameter_hash(tmp_path / name))
  assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
  'preset', [pytest.param(name, marks=[pytest.mark.learn] * (name != 'PPO')) for name in PRESETS]
)
def test_every_preset_solves_cartpole(tmp_path, preset):
  """Fails when clipping and V-trace do not switch independently, or a switch breaks learning."""
  result = launch(CONFIG, *SOLVE, *PRESETS[preset], '--workdir=run', cwd=tmp_path)
  assert result.returncode == 0, result.stdout
  assert 'train.stop_at_return 475.0 reached' in result.stdout
  if '--config.train.synchronous' in PRESETS[preset]:
    rows = [row for row in metrics(tmp_path / 'run') if row['lag_updates_max'] is not None]
    assert {row['lag_updates_max'] for row in rows} == {0.0}, 'a synchronous sample is never old'
    assert all(row['samples_dropped'] == 0 for row in rows)


def test_a_batch_that_streams_cannot_share_equally_is_refused(tmp_path):
  """Fails when a synchronous run would wait for ever for a row that nobody may fill."""
  result = launch(
    CONFIG,
    '--config.train.synchronous',
    '--config.sampler.num_workers=1',
    '--config.sampler.envs_per_worker=6',
    '--config.learner.batch_size=1024',
    cwd=tmp_path,
  )
  assert result.returncode == 2
  assert 'use 960 or 1152' in result.stdout
  assert 'Traceback' not in result.stdout


@pytest.mark.parametrize('mode', ['--config.train.serial', '--noconfig.train.serial'])
def test_an_encoder_that_does_not_fit_is_refused_before_the_run_folder_is_bound(tmp_path, mode):
  """Fails when a wrong encoder is found by the learner, after config.json has been written."""
  before = scratch_folders()
  result = launch(CONFIG, mode, '--config.model.encoder=conv_simple', '--workdir=run', cwd=tmp_path)
  assert result.returncode == 2, result.stdout
  assert 'use mlp' in result.stdout
  assert 'Traceback' not in result.stdout
  assert not (tmp_path / 'run' / 'config.json').exists()
  assert scratch_folders() == before
