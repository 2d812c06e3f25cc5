"""A run whose learner is slow: what is too old is not trained on, and lag tells why it is old."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfjax import entries
from sfjax.config import Config, Core, Encoder
from sfjax.metrics.records import LAG_METRICS
from sfjax.runtime import Outcome, Runtime
from sfjax.training import prepare
from tests.launching import metrics

MAX_LAG = 2
UPDATE_S = 1.0


def slow_learner_main(shared: entries.Shared, trains: bool) -> None:
  """The learner, whose updates take a second longer and are made twice.

  The first time what is too old is garbage. Both results are compared, a line each in the run
  folder.
  """
  from sfjax.learner import setup

  compiled_update = setup.compiled_update

  def slow_update(config: Any, env: Any) -> Any:
    update, prepare = compiled_update(config, env)

    def twice(state: Any, batch: Any, hyperparams: Any, shuffle: Any) -> Any:
      import jax

      time.sleep(UPDATE_S)
      copy = jax.tree.map(lambda leaf: leaf.copy(), state)
      version = int(np.asarray(state.version)[0])
      spoiled: Any = {name: np.array(array) for name, array in batch.items()}
      stale = spoiled['played'] & (version - spoiled['version'] > MAX_LAG)
      for name in ('rewards', 'behaviour_log_prob', 'behaviour_value'):
        spoiled[name][stale] = np.nan
      spoiled['actions'][stale] = 1 - spoiled['actions'][stale]
      spoiled_state, spoiled_metrics = update(copy, spoiled, hyperparams, shuffle)
      new_state, new_metrics = update(state, batch, hyperparams, shuffle)
      old = [np.asarray(leaf) for leaf in jax.tree.leaves((new_state, new_metrics))]
      new = [np.asarray(leaf) for leaf in jax.tree.leaves((spoiled_state, spoiled_metrics))]
      record = {
        'version': version,
        'stale': int(stale.sum()),
        'played': int(spoiled['played'].sum()),
        'same': all(a.tobytes() == b.tobytes() for a, b in zip(old, new, strict=True)),
      }
      with (Path(shared.workdir) / 'checked.jsonl').open('a') as file:
        file.write(json.dumps(record) + '\n')
      return new_state, new_metrics

    return twice, prepare

  setup.compiled_update = slow_update
  entries.learner_main(shared, trains)


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
  """Batches as the slow learner saw them, the run's metrics and its last counters."""
  workdir = tmp_path_factory.mktemp('slow')
  config = Config(name='slow')
  config.env.name = 'CartPole-v1'
  config.model.encoder, config.model.mlp_layers = Encoder.MLP, (16,)
  config.model.core = Core.NONE
  config.sampler.num_workers, config.sampler.envs_per_worker = 1, 16
  config.learner.rollout, config.learner.batch_size = 8, 64
  config.learner.max_policy_lag = MAX_LAG
  config.learner.num_threads = 1
  config.train.max_frames, config.train.report_every_s = 384, 1.0
  config.train.max_seconds = 90.0
  prepare(config)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(entries, 'learner_main', slow_learner_main)
    runtime = Runtime(config, workdir)
    assert runtime.run() is Outcome.MAX_FRAMES
  checked = [json.loads(line) for line in (workdir / 'checked.jsonl').read_text().splitlines()]
  counters = {name: int(runtime.status[name][0]) for name in ('samples', 'samples_dropped')}
  return checked, metrics(workdir), counters


def test_what_is_too_old_changes_neither_loss_nor_gradient(run):
  """Catches a limit that is not applied, or applied after the arithmetic: here to real rows."""
  checked, _, counters = run
  assert sum(batch['stale'] > 0 for batch in checked) >= 2, 'nothing was ever too old'
  assert all(batch['same'] for batch in checked)
  assert checked[-1]['version'] >= 3, 'and yet it learns'
  stale, played = (sum(batch[name] for batch in checked) for name in ('stale', 'played'))
  assert counters == {'samples': played - stale, 'samples_dropped': stale}


def test_a_slow_learner_shows_as_backlog(run):
  """Catches causes that are swapped, or a lag that stands for both."""
  rows = [row for row in run[1] if row['lag_updates_mean'] is not None]
  assert rows
  for row in rows:
    whole, stale, backlog = np.array([row[name] for name in LAG_METRICS]).reshape(3, 4)
    assert stale[0] + backlog[0] == pytest.approx(whole[0])
    for mean, median, p90, largest in (whole, stale, backlog):
      assert 0 <= mean <= largest and 0 <= median <= p90 <= largest
  # The server takes new weights within milliseconds; the rows wait for seconds.
  assert max(row['lag_updates_backlog_mean'] for row in rows) > 1
  assert max(row['lag_updates_stale_mean'] for row in rows) < 0.1
