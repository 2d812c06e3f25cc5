"""Evaluation: so many episodes, an equal share in each environment, the same for the same seed."""

import json
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

from sfjax import config as config_lib
from sfjax import evaluation
from sfjax.actors.splits import episode_seed
from sfjax.checkpoints import Checkpoints, Progress
from sfjax.evaluation import FIRST_STREAM, MAX_ENVS, Episode, evaluate, play, summarize
from sfjax.fields import to_dict
from sfjax.inference.act import ActOutput, make_act
from sfjax.learner.setup import initial_states
from sfjax.models.actor_critic import make_model
from sfjax.specs import EnvSpec, array_spec, discrete

CARTPOLE = EnvSpec({'obs': array_spec(np.float32, 4)}, action=discrete(2))
KEYS = (
  'episodes episode_return_mean episode_return_stderr episode_return_median episode_return_min '
  'episode_return_max episode_length_mean truncated_episodes deterministic checkpoint_frames'
).split()


def make_config(*, seed=0, core=config_lib.Core.GRU) -> config_lib.Config:
  config = config_lib.Config()
  config.env.name, config.train.seed = 'CartPole-v1', seed
  config.model.encoder, config.model.mlp_layers = config_lib.Encoder.MLP, (8,)
  config.model.core, config.model.core_size = core, 8
  return config


@pytest.fixture(scope='module')
def states() -> list[Any]:
  return jax.tree.map(np.array, initial_states(make_config(), CARTPOLE))


@pytest.fixture(scope='module')
def sampled() -> Any:
  return make_act(make_model(make_config(), CARTPOLE), CARTPOLE.action)


@pytest.mark.parametrize('episodes', (1, 5, 20))
def test_as_many_episodes_as_asked_are_played_to_their_end(states, sampled, episodes):
  """Catches an episode that is missing, cut short or counted twice."""
  results = play(make_config(), sampled, states[0].params, episodes=episodes)
  assert len(results) == episodes
  for result in results:
    # CartPole pays 1 for every step, and a fresh policy does not reach its limit of 500.
    assert result.episode_return == result.length > 5
    assert not result.truncated


def test_a_seed_decides_the_episodes(states, sampled):
  """Catches noise from the order of calls, and a seed that does not reach policy or environment."""

  def returns(seed: int) -> list[Episode]:
    return play(make_config(seed=seed), sampled, states[0].params, episodes=6)

  assert returns(0) == returns(0)
  assert returns(0) != returns(1)


class LoggedEnv:
  """Environment i ends every episode after i + 1 steps, each third one by truncation."""

  log: list[tuple[str, int, int]] = []
  observation_space = gymnasium.spaces.Box(-9.0, 9.0, (4,))
  action_space = gymnasium.spaces.Discrete(100)

  def __init__(self, index: int) -> None:
    self.index = index

  def reset(self, *, seed: int) -> tuple[np.ndarray, dict]:
    self.log.append(('reset', self.index, seed))
    self.steps = 0
    self.episode = getattr(self, 'episode', -1) + 1
    return np.array([self.index, self.episode, 0, 0], np.float32), {}

  def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
    assert isinstance(action, int)
    self.steps += 1
    assert self.steps <= self.index + 1, 'stepped beyond an end'
    obs = np.array([self.index, self.episode, self.steps, 0], np.float32)
    ended = self.steps == self.index + 1
    truncated = ended and self.episode % 3 == 0
    return obs, float(action), ended and not truncated, truncated, {}

  def close(self) -> None:
    self.log.append(('close', self.index, 0))


class Acts:
  """Acts on what it is shown, and keeps it."""

  def __init__(self) -> None:
    self.calls: list[dict[str, np.ndarray]] = []

  def __call__(self, params: Any, obs: Any, core: Any, first: Any, identity: Any, mask: Any) -> Any:
    assert mask is None
    self.calls.append(
      {'obs': obs['obs'].copy(), 'first': first.copy(), 'identity': identity, 'core': core.copy()}
    )
    action = (obs['obs'][:, 0] + 2 * obs['obs'][:, 1]).astype(np.int32)
    return ActOutput(action[:, None], action, action, core + 1, action)  # pyright: ignore[reportArgumentType]


def test_every_environment_plays_its_share(monkeypatch):
  """Catches short episodes that count more often, a state, start or identity of another stream."""
  monkeypatch.setattr(evaluation, 'make_env', lambda name, context: LoggedEnv(context.index))
  monkeypatch.setattr(LoggedEnv, 'log', [])
  acts = Acts()
  results = play(make_config(seed=3), acts, None, episodes=2 * MAX_ENVS + 3)
  # 35 episodes over 16 environments: 3 each for the first three, 2 each for the others.
  shares = [sum(result.length == i + 1 for result in results) for i in range(MAX_ENVS)]
  assert shares == [3] * 3 + [2] * (MAX_ENVS - 3)
  # Environment i pays i + 2 · episode a step; its first episode, and every third, is truncated.
  for i in (0, 1, 9):
    own = [result for result in results if result.length == i + 1]
    assert [result.episode_return for result in own] == [
      (i + 1) * (i + 2 * episode) for episode in range(shares[i])
    ]
    assert [result.truncated for result in own] == [True, False, False][: shares[i]]
  resets = [(index, seed) for what, index, seed in LoggedEnv.log if what == 'reset']
  for i in range(MAX_ENVS):
    expected = [episode_seed(3, FIRST_STREAM + i, episode) for episode in range(shares[i])]
    assert [seed for index, seed in resets if index == i][: shares[i]] == expected
  assert sorted(index for what, index, _ in LoggedEnv.log if what == 'close') == list(range(16))
  for call in acts.calls[: MAX_ENVS * 2]:
    np.testing.assert_array_equal(call['first'], call['obs'][:, 2] == 0)
    running = call['obs'][:, 1] < shares
    index, episode, step, _ = call['obs'][running].T
    expected = np.stack([0 * index + 3, 0 * index, FIRST_STREAM + index, episode, step], axis=1)
    np.testing.assert_array_equal(call['identity'][running], expected)
  # The state that comes back goes in again with the next step.
  assert [call['core'][0, 0] for call in acts.calls[:4]] == [0, 1, 2, 3]


def test_every_environment_is_closed_when_one_fails(monkeypatch):
  """Catches engines that are left behind by an error."""

  class Failing(LoggedEnv):
    def step(self, action: int) -> Any:
      raise OSError('the engine is gone')

  monkeypatch.setattr(evaluation, 'make_env', lambda name, context: Failing(context.index))
  monkeypatch.setattr(LoggedEnv, 'log', [])
  with pytest.raises(OSError, match='the engine is gone'):
    play(make_config(), Acts(), None, episodes=3)
  assert [entry for entry in LoggedEnv.log if entry[0] == 'close'] == [
    ('close', i, 0) for i in range(3)
  ]


def test_the_summary_by_hand():
  """Catches a deviation for an error of the mean, n for n - 1, and numbers that JSON lacks."""
  results = [Episode(1.0, 10, False), Episode(2.0, 20, True), Episode(9.0, 60, True)]
  summary = summarize(results, deterministic=True, checkpoint_frames=77)
  assert list(summary) == KEYS
  # Mean 4; squares 9 + 4 + 25 = 38, over 2 is 19; sqrt(19 / 3) = 2.516611.
  assert summary == {
    'episodes': 3,
    'episode_return_mean': 4.0,
    'episode_return_stderr': pytest.approx(2.516611),
    'episode_return_median': 2.0,
    'episode_return_min': 1.0,
    'episode_return_max': 9.0,
    'episode_length_mean': 30.0,
    'truncated_episodes': 2,
    'deterministic': True,
    'checkpoint_frames': 77,
  }
  one = summarize(results[:1], deterministic=False, checkpoint_frames=0)
  assert (one['episode_return_stderr'], one['deterministic']) == (0.0, False)
  json.dumps([summary, one], allow_nan=False)


@pytest.fixture
def run_folder(tmp_path, states):
  """A run folder with two checkpoints; in the older, action 0 is all but certain."""
  config = make_config()
  (tmp_path / 'config.json').write_text(json.dumps({'config': to_dict(config)}))
  older = jax.tree.map(np.copy, states)
  older[0].params['params']['policy_head']['bias'][:] = 9.0, -9.0
  checkpoints = Checkpoints(tmp_path, keep=3)
  checkpoints.save([older[0]._replace(version=np.array(1, np.int32))], Progress([10], [10], [0]))
  checkpoints.save([states[0]._replace(version=np.array(5, np.int32))], Progress([50], [50], [0]))
  return tmp_path


def test_a_checkpoint_is_scored_and_the_last_line_is_json(run_folder, capsys):
  """Catches another checkpoint than the one asked for, and a flag that is printed but not used."""

  def score(checkpoint: str, *, deterministic: bool) -> dict[str, Any]:
    code = evaluate(run_folder, episodes=4, deterministic=deterministic, checkpoint=checkpoint)
    assert code == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])

  newest = score('latest', deterministic=False)
  assert list(newest) == KEYS
  assert (newest['episodes'], newest['checkpoint_frames']) == (4, 50)
  assert newest['deterministic'] is False
  likeliest = score('5', deterministic=True)
  assert likeliest['deterministic'] is True
  assert likeliest['episode_return_mean'] != newest['episode_return_mean']
  older = score('1', deterministic=False)
  # Always pushing the cart to one side ends an episode within 11 steps.
  assert older['checkpoint_frames'] == 10
  assert older['episode_return_max'] < 12 < newest['episode_return_max']


@pytest.mark.parametrize('checkpoint', ('7', 'best', '-1'))
def test_a_checkpoint_that_is_not_there_is_told(run_folder, capsys, checkpoint):
  """Catches another checkpoint in its place."""
  assert evaluate(run_folder, episodes=1, deterministic=False, checkpoint=checkpoint) == 2
  told = capsys.readouterr()
  assert 'Cannot evaluate' in told.err and checkpoint in told.err
  assert told.out == ''
