"""Numbers of environments that do not divide evenly over workers and splits."""

import pytest

from sfjax.config import Config, resolve, streams, validate, worker_envs
from tests.launching import ROOT, launch, metrics


def resolved(*, workers=None, total=None, each=None, splits=2) -> tuple[Config, list[str]]:
  config = Config()
  config.sampler.num_workers, config.sampler.num_splits = workers, splits
  config.sampler.num_envs, config.sampler.envs_per_worker = total, each
  chosen = resolve(config, cpus=8, cpus_reason='a test', accelerator=False)
  return config, [line for line in chosen if 'num_threads' not in line]


@pytest.mark.parametrize(
  'workers, total, splits, expected',
  (
    (2, 8, 2, (4, 4)),
    (4, 10, 2, (3, 3, 2, 2)),
    (3, 7, 3, (3, 2, 2)),
    (2, 6, 2, (3, 3)),
    (5, 5, 1, (1, 1, 1, 1, 1)),
  ),
)
def test_a_total_is_shared_by_the_workers(workers, total, splits, expected):
  """Catches environments that are lost or added, and unevenness without a word."""
  config, chosen = resolved(workers=workers, total=total, splits=splits)
  validate(config)
  assert worker_envs(config) == expected
  assert streams(config) == total
  uneven = any(envs % splits for envs in expected) or len(set(expected)) > 1
  warnings = [line for line in chosen if line.startswith('warning')]
  assert len(warnings) == uneven
  if uneven:
    assert warnings == [
      f'warning: sampler.num_envs {total} is not a multiple of {workers} workers × {splits} '
      f'splits: workers and splits differ by one environment'
    ]


def test_fewer_environments_than_workers_start_fewer_workers():
  """Catches workers without an environment, which would wait for ever."""
  config, chosen = resolved(workers=8, total=3)
  validate(config)
  assert worker_envs(config) == (1, 1, 1)
  assert 'sampler.num_workers = 3: there are only 3 environments' in chosen
  # As many workers as CPUs, when not given: half of 8 here.
  config, chosen = resolved(total=3)
  assert worker_envs(config) == (1, 1, 1)
  config, chosen = resolved(total=40)
  assert worker_envs(config) == (10, 10, 10, 10)


def test_a_number_for_each_worker_is_16_or_that_given():
  """Catches a total that changes what it leaves unset."""
  assert worker_envs(resolved(workers=2)[0]) == (16, 16)
  assert worker_envs(resolved(workers=2, each=4)[0]) == (4, 4)


@pytest.mark.parametrize(
  'numbers, problem',
  (
    ({'total': 10, 'each': 5}, 'sampler.num_envs 10 and sampler.envs_per_worker 5 are both given'),
    ({'total': 0}, 'sampler.num_envs is 0; it must be above 0'),
    ({'total': -4}, 'sampler.num_envs is -4; it must be above 0'),
    ({'each': 0}, 'sampler.envs_per_worker is 0; it must be above 0'),
    ({'each': 5}, 'envs_per_worker 5 is not a multiple of sampler.num_splits 2; use 4 or 6'),
  ),
)
def test_what_cannot_be_meant_is_refused(numbers, problem):
  """Catches two numbers of which one is silently ignored."""
  config, _ = resolved(workers=2, **numbers)
  with pytest.raises(ValueError) as caught:
    validate(config)
  assert problem in str(caught.value)


def test_an_uneven_run_trains_with_every_environment(tmp_path):
  """Catches a worker that waits for a split it does not have: 5 environments, 3 workers."""
  result = launch(
    f'--config={ROOT}/configs/cartpole.py',
    '--workdir=run',
    '--config.sampler.num_envs=5',
    '--config.sampler.num_workers=3',
    '--config.learner.batch_size=64',
    '--config.train.max_frames=4000',
    '--config.train.max_seconds=40',
    cwd=tmp_path,
  )
  assert result.returncode == 0, result.stdout
  assert 'warning: sampler.num_envs 5 is not a multiple of 3 workers × 2 splits' in result.stdout
  for worker, envs in enumerate((2, 2, 1)):
    assert f'worker {worker}: {envs} environments' in result.stdout
  assert 'train.max_frames 4,000 reached' in result.stdout
  assert metrics(tmp_path / 'run')[-1]['frames'] >= 4000
