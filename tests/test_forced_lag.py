"""Learning from weights that are always 20 updates old: what V-trace is for. `make test-learn`."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from configs.cartpole import get_config
from sfjax import entries
from sfjax.runtime import Runtime
from sfjax.shm.params import ParameterBuffer
from sfjax.training import prepare
from tests.launching import metrics

pytestmark = pytest.mark.learn

LAG = 20


class LatePublisher(ParameterBuffer):
  """Publishes each version when the learner is `LAG` further."""

  def publish(self, policy: int, version: int, data: np.ndarray) -> None:
    waiting = self.__dict__.setdefault('waiting', deque())
    waiting.append((version, data.copy()))
    if version == 0 or len(waiting) > LAG:
      super().publish(policy, *waiting.popleft())


def late_learner_main(shared: entries.Shared, trains: bool) -> None:
  """The learner, its publications late."""
  from sfjax.learner import setup

  patched: Any = setup
  patched.ParameterBuffer = LatePublisher
  entries.learner_main(shared, trains)


def mean_return(workdir, *, use_vtrace: bool, seed: int) -> float:
  """Mean return over the last third of a run of policy gradients without a clip."""
  config = get_config()
  config.loss.use_vtrace, config.loss.use_clip = use_vtrace, False
  config.learner.epochs, config.learner.batch_size = 1, 512
  config.train.seed, config.train.stop_at_return = seed, None
  config.train.max_frames, config.train.report_every_s = 400_000, 1.0
  prepare(config)
  workdir.mkdir()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(entries, 'learner_main', late_learner_main)
    Runtime(config, workdir).run()
  rows = metrics(workdir)
  stale = [row['lag_updates_stale_mean'] for row in rows if row['lag_updates_stale_mean']]
  assert stale[-1] == pytest.approx(LAG, abs=1), 'the lag is what the test is about'
  late = [row for row in rows if row['frames'] > 267_000]
  return float(np.mean([row['episode_return_mean'] for row in late]))


@pytest.mark.parametrize('seed', (0, 1, 2))
def test_vtrace_learns_better_from_old_samples_than_no_correction(tmp_path, seed):
  """Catches ratios that correct nothing, or are those of another version."""
  found = {
    use: mean_return(tmp_path / str(use), use_vtrace=use, seed=seed) for use in (True, False)
  }
  print(f'seed {seed}: V-trace {found[True]:.0f}, none {found[False]:.0f}')
  assert found[True] > 1.3 * found[False]
