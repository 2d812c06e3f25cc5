"""A real ViZDoom run through every process, watched while it lives and after it has ended."""

import math
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.launching import (
  Run,
  alive,
  launch,
  metrics,
  scratch_folders,
  shared_memory,
)

pytest.importorskip('vizdoom')

ROOT = Path(__file__).parent.parent
SMALL = (
  f'--config={ROOT}/configs/doom.py',
  '--config.sampler.envs_per_worker=4',
  '--config.sampler.num_workers=2',
  '--config.learner.batch_size=128',
  '--config.train.report_every_s=1',
)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """One small run to its frame budget; what was seen of its processes on the way."""
  cwd = tmp_path_factory.mktemp('doom')
  before = shared_memory(), scratch_folders()
  run = Run(*SMALL, '--config.train.max_frames=12000', '--workdir=run', cwd=cwd)
  run.wait_for('frames/s')
  tree = run.tree()
  maps = {}
  for process in tree:
    maps[process.pid] = Path(f'/proc/{process.pid}/maps').read_text()
  code = run.process.wait(timeout=120)
  return cwd, run, code, tree, maps, before


def test_the_run_ends_by_itself_with_exit_code_0(finished):
  _, run, code, *_ = finished
  assert code == 0, run.output
  assert 'Finished: train.max_frames 12,000 reached' in run.output
  assert '--mode=eval' in run.output


def test_no_process_engine_or_shared_memory_is_left(finished):
  _, run, _, tree, _, before = finished
  assert len(tree) >= 8 + 5, 'the game engines were seen'
  assert alive(tree) == [], run.output
  assert (shared_memory(), scratch_folders()) == before


def test_only_server_and_learner_map_jaxlib(finished):
  maps = finished[4]
  assert sum('jaxlib' in text for text in maps.values()) == 2
  assert sum('libpython' in text or 'python3' in text for text in maps.values()) >= 5


def test_updates_happened_and_their_lag_is_real(finished):
  rows = metrics(finished[0] / 'run')
  assert rows[-1]['version'] >= 10
  assert rows[-1]['frames'] == 4 * rows[-1]['samples'] >= 12_000
  lags = [row['lag_updates_mean'] for row in rows if row['lag_updates_mean'] is not None]
  assert lags
  assert all(math.isfinite(lag) and lag >= 0 for lag in lags)
  assert any(lag > 0 for lag in lags), 'a lag that is always 0 is not measured'


def test_nothing_is_collected_for_nothing(finished):
  last = metrics(finished[0] / 'run')[-1]
  assert last['samples_dropped'] < 0.02 * (last['samples'] + last['samples_dropped'])


def test_the_parameters_have_moved(finished):
  import jax

  from sfjax.checkpoints import Checkpoints
  from sfjax.envs.registry import EnvContext, make_env
  from sfjax.learner.setup import initial_states
  from sfjax.specs import env_spec
  from sfjax.training import load_config

  workdir = finished[0] / 'run'
  config = load_config(workdir)
  env = make_env(config.env.name, EnvContext())
  start = initial_states(config, env_spec(env.observation_space, env.action_space))
  restored = Checkpoints(workdir).restore(start)
  assert int(restored.states[0].version) == restored.step >= 10
  for old, new in zip(
    jax.tree.leaves(start[0].params), jax.tree.leaves(restored.states[0].params), strict=True
  ):
    assert np.isfinite(new).all()
    assert not np.array_equal(old, new), 'a layer that no gradient reaches'


def test_the_run_can_be_evaluated(finished):
  import json

  result = launch('--mode=eval', '--workdir=run', '--episodes=3', cwd=finished[0])
  assert result.returncode == 0, result.stdout
  summary = json.loads(result.stdout.splitlines()[-1])
  assert summary['episodes'] == 3
  assert summary['checkpoint_frames'] >= 12_000
  assert -400 < summary['episode_return_mean'] <= 100


@pytest.mark.parametrize(('signum', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_in_order(tmp_path, signum, code):
  """Fails when a signal kills the runtime before it has saved and cleaned up."""
  before = shared_memory(), scratch_folders()
  run = Run(*SMALL, '--workdir=run', cwd=tmp_path)
  run.wait_for('frames/s')
  tree = run.tree()
  run.process.send_signal(signum)
  assert run.process.wait(timeout=60) == code, run.output
  assert 'Traceback' not in run.output
  assert list((tmp_path / 'run' / 'checkpoints').iterdir()), 'nothing was saved'
  assert alive(tree) == []
  assert (shared_memory(), scratch_folders()) == before


def test_the_slab_holds_what_the_game_shows(tmp_path):
  """Fails when an observation lands in another row or slot, or is overwritten too early."""
  from configs.doom import get_config
  from sfjax.actors.splits import episode_seed
  from sfjax.config import resolve
  from sfjax.envs.registry import EnvContext, make_env
  from sfjax.runtime import Runtime

  config = get_config('basic')
  config.sampler.num_workers, config.sampler.envs_per_worker = 1, 4
  config.learner.rollout, config.learner.batch_size = 256, 1024  # Nobody completes a row.
  config.sampler.decorrelation_steps = 0  # Every episode is in the slab from its start.
  resolve(config, cpus=1, cpus_reason='test', accelerator=False)
  runtime = Runtime(config, tmp_path, trains=False)
  try:
    runtime.start()
    while runtime.status['acted'][0] < 200:
      runtime.poll()
  finally:
    runtime.stop()
  slab, table = runtime.shared.map_slab(), runtime.shared.map_streams()
  shown = set()
  for stream in range(4):
    row, last = int(table['row'][stream]), int(table['slot'][stream])
    starts = np.flatnonzero(slab['first'][row, : last + 1])
    env = make_env(config.env.name, EnvContext(env_id=stream, frameskip=4))
    for episode, start in zip(range(-len(starts) + 1, 1), starts, strict=True):
      number = int(table['episode'][stream]) + episode
      obs, _ = env.reset(seed=episode_seed(config.train.seed, stream, number))
      for slot in range(start, last + 1):
        np.testing.assert_array_equal(slab['obs/obs'][row, slot], obs)
        shown.add(obs.tobytes())
        if slot == last or not slab['played'][row, slot]:
          break
        obs, _, terminated, *_ = env.step(int(slab['actions'][row, slot, 0]))
        if terminated:
          break
    env.close()
  assert len(shown) > 50
