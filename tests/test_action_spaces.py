"""A hybrid, masked action space and a dictionary observation through every process."""

import json

import pytest

from tests.launching import ROOT, launch, metrics

FLAGS = (
  f'--config={ROOT}/configs/cartpole.py',
  '--config.name=strict',
  '--config.env.name=tests.strict_env:StrictHybrid-v0',
  '--config.env.reward_scale=1',
  '--config.loss.gamma=0.5',
  '--config.loss.kl_coef=0.01',  # Has the distribution that acted stored.
  '--config.loss.exploration_coef=0',
  '--config.learner.learning_rate=0.003',
  '--config.train.stop_at_return=5',
  '--config.train.max_seconds=60',
)


SQUASHED = (
  '--config.model.squash_actions',
  '--config.model.adaptive_stddev=False',
  '--config.learner.minibatches=2',
  '--config.loss.use_vtrace=False',
)


@pytest.mark.parametrize('options', ((), pytest.param(SQUASHED, marks=pytest.mark.learn)))
def test_a_hybrid_masked_task_is_learned_and_evaluated(tmp_path, options):
  """Catches an action that is no member, a mask that the learner ignores, keys mixed up.

  The environment raises on a forbidden action. Of 10 steps each pays 1 for the right choice and
  less for a box that is off: 0 at random among what is allowed, 10 at best.
  """
  result = launch(*FLAGS, *options, '--workdir=run', cwd=tmp_path)
  assert result.returncode == 0, result.stdout
  assert 'is no member' not in result.stdout and 'is forbidden' not in result.stdout
  assert 'train.stop_at_return 5.0 reached' in result.stdout, result.stdout
  rows = [row for row in metrics(tmp_path / 'run') if row['kl'] is not None]
  assert rows and all(row['kl'] >= 0 for row in rows)
  # A mask that only one of acting and learning has makes ratios far from 1 from the start.
  assert 0.8 < rows[0]['ratio_p05'] <= rows[0]['ratio_p95'] < 1.25
  score = launch('--mode=eval', '--workdir=run', '--episodes=20', '--deterministic', cwd=tmp_path)
  assert json.loads(score.stdout.splitlines()[-1])['episode_return_mean'] > 5, score.stdout
