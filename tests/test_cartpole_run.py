"""CartPole through every process: it learns, resumes, and outlives the death of its parts."""

import json
import os
import signal
import time
from pathlib import Path

from tests.launching import Run, alive, launch, metrics, named, scratch_folders

ROOT = Path(__file__).parent.parent
CONFIG = f'--config={ROOT}/configs/cartpole.py'
SMALL = (
  CONFIG,
  '--config.sampler.num_workers=2',
  '--config.sampler.envs_per_worker=4',
  '--config.train.report_every_s=1',
)


def test_cartpole_is_learned_and_evaluated(tmp_path):
  """Fails when the learning signal is wrong anywhere between environment and optimizer."""
  result = launch(
    CONFIG, '--config.train.max_seconds=60', '--config.train.stop_at_return=475',
    '--workdir=run', cwd=tmp_path,
  )  # fmt: skip
  assert result.returncode == 0, result.stdout
  assert 'train.stop_at_return 475.0 reached' in result.stdout
  score = launch('--mode=eval', '--workdir=run', '--episodes=20', '--deterministic', cwd=tmp_path)
  summary = json.loads(score.stdout.splitlines()[-1])
  assert summary['episode_return_mean'] >= 400, score.stdout
  assert summary['deterministic'] is True
  again = launch(CONFIG, '--config.train.stop_at_return=475', '--workdir=run', cwd=tmp_path)
  assert again.returncode == 0
  assert 'is finished' in again.stdout
  assert '--config.train.stop_at_return' in again.stdout


def test_a_run_resumes_where_it_stopped(tmp_path):
  """Fails when counters, versions or the optimizer start from nothing again."""
  first = launch(*SMALL, '--config.train.max_frames=20000', '--workdir=run', cwd=tmp_path)
  assert first.returncode == 0, first.stdout
  before = metrics(tmp_path / 'run')[-1]
  second = launch(*SMALL, '--config.train.max_frames=40000', '--workdir=run', cwd=tmp_path)
  assert second.returncode == 0, second.stdout
  assert f'resumed from checkpoint {before["version"]} at {before["frames"]:,}' in second.stdout
  rows = metrics(tmp_path / 'run')
  frames = [row['frames'] for row in rows]
  assert frames == sorted(frames), 'the axis doubled back'
  assert frames[-1] >= 40_000
  assert rows[-1]['version'] > before['version']
  done = launch(*SMALL, '--config.train.max_frames=40000', '--workdir=run', cwd=tmp_path)
  assert done.returncode == 0
  assert '--config.train.max_frames=80000' in done.stdout


def test_a_killed_worker_is_replaced_and_a_killed_runtime_leaves_nothing(tmp_path):
  """Fails when a death stalls the run, or when processes outlive a runtime killed outright."""
  before = scratch_folders()
  run = Run(*SMALL, '--workdir=run', cwd=tmp_path)
  run.wait_for('frames/s')
  worker = int(run.output.split('worker 0: ')[1].split('pid ')[1].split()[0])
  os.kill(worker, signal.SIGKILL)
  run.wait_for('restarted as generation 1')
  run.wait_for('generation 1, seed')
  frames = metrics(tmp_path / 'run')[-1]['frames']
  seen = run.output.count('frames/s')
  deadline = time.monotonic() + 30
  while run.output.count('frames/s') < seen + 3 and time.monotonic() < deadline:
    time.sleep(0.1)
  assert metrics(tmp_path / 'run')[-1]['frames'] > frames + 1000, run.output
  tree = run.tree()
  run.process.kill()
  run.process.wait()
  assert alive(tree) == []
  assert scratch_folders() == before


def test_a_dead_server_ends_the_run_and_says_so(tmp_path):
  """Fails when the loss of a process that cannot be replaced is a silent stall."""
  run = Run(*SMALL, '--workdir=run', cwd=tmp_path)
  run.wait_for('frames/s')
  tree = run.tree()
  mapped = [p for p in tree if 'jaxlib' in Path(f'/proc/{p.pid}/maps').read_text()]
  server = min(mapped, key=lambda p: p.memory_info().rss)
  os.kill(server.pid, signal.SIGKILL)
  assert run.process.wait(timeout=60) == 1
  assert 'ended with exit code -9' in run.output
  assert alive(tree) == []
  assert named(tree, 'spawn_main') == []
