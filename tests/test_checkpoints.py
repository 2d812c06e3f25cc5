"""Checkpoints: everything comes back bit for bit, of the newest step that is complete."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from sfjax import config as config_lib
from sfjax.checkpoints import FOLDER, Checkpoints, Progress
from sfjax.learner.devices import first_replica, replicate
from sfjax.learner.setup import initial_states
from sfjax.learner.update import LearnerState
from sfjax.specs import EnvSpec, array_spec, discrete

ENV = EnvSpec({'obs': array_spec(np.float32, 3)}, action=discrete(4))


def make_config() -> config_lib.Config:
  config = config_lib.Config()
  config.model.encoder, config.model.mlp_layers = config_lib.Encoder.MLP, (4,)
  config.model.core_size = 2
  config.train.num_policies = 2
  return config


def make_states(seed: int, versions=(3, 4)) -> list[LearnerState]:
  """States of two policies in which no number is like another."""
  rng = np.random.default_rng(seed)

  def fill(leaf: Any) -> np.ndarray:
    if leaf.dtype == np.int32:
      return np.array(rng.integers(1, 10**9), np.int32)
    return rng.normal(size=leaf.shape).astype(leaf.dtype)

  states = jax.tree.map(fill, template())
  return [
    state._replace(version=np.array(version, np.int32))
    for state, version in zip(states, versions, strict=True)
  ]


def template() -> list[LearnerState]:
  return jax.eval_shape(lambda: initial_states(make_config(), ENV))


def progress(number: int) -> Progress:
  return Progress([number, 2 * number], [3 * number, 4 * number], [5 * number, 6 * number])


def assert_same(one: Any, other: Any) -> None:
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert (np.asarray(a).dtype, np.shape(a)) == (np.asarray(b).dtype, np.shape(b))
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_states_and_counters_come_back_bit_for_bit(tmp_path):
  """Catches optax state that becomes a dictionary, policies swapped, a float64 or a lost bit."""
  states = make_states(0)
  assert Checkpoints(tmp_path, keep=3).save(states, progress(2**40)) == 7
  for reader in (Checkpoints(tmp_path), Checkpoints(tmp_path, keep=3)):
    restored = reader.restore(template())
    assert (restored.step, restored.progress) == (7, progress(2**40))
    assert_same(restored.states, states)
    for state in restored.states:
      assert isinstance(state, LearnerState)
      assert isinstance(state.opt_state, optax.ScaleByAdamState)


def test_states_on_devices_are_saved_as_they_are_at_that_moment(tmp_path):
  """Catches a save that still reads when the state is donated and written over."""
  states = make_states(1)
  replicas: Any = [replicate(state) for state in states]
  Checkpoints(tmp_path, keep=1).save([first_replica(state) for state in replicas], progress(1))
  grow = jax.pmap(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
  jax.block_until_ready([grow(state) for state in replicas])
  assert_same(Checkpoints(tmp_path).restore(template()).states, states)


def test_the_newest_steps_are_kept_and_any_of_them_restored(tmp_path):
  """Catches an order by name (9 after 10), and too many or too few that are kept."""
  checkpoints = Checkpoints(tmp_path, keep=2)
  saved = {}
  for number, versions in enumerate([(4, 4), (4, 5), (5, 5), (50, 50)]):
    saved[sum(versions)] = make_states(number, versions)
    checkpoints.save(saved[sum(versions)], progress(number))
  for reader in (checkpoints, Checkpoints(tmp_path)):
    assert reader.steps() == [10, 100]
    assert reader.restore(template()).step == 100
    restored = reader.restore(template(), 10)
    assert (restored.step, restored.progress) == (10, progress(2))
    assert_same(restored.states, saved[10])


def test_a_step_saved_twice_is_saved_once(tmp_path):
  """Catches an error, or an overwritten step, when nothing was learned between two saves."""
  checkpoints = Checkpoints(tmp_path, keep=2)
  states = make_states(0)
  assert checkpoints.save(states, progress(1)) == checkpoints.save(states, progress(2)) == 7
  assert Checkpoints(tmp_path, keep=2).save(states, progress(3)) == 7
  assert Checkpoints(tmp_path).steps() == [7]


def half_written(workdir: Path, name: str) -> None:
  """What a save that was killed leaves."""
  folder = workdir / FOLDER / name / 'states'
  folder.mkdir(parents=True)
  (folder / 'part').write_bytes(b'\0' * 100)


@pytest.mark.parametrize('name', ('9.orbax-checkpoint-tmp', '9.orbax-checkpoint-tmp-17', '9'))
def test_a_half_written_step_is_passed_over(tmp_path, name):
  """Catches a run that cannot be resumed after a kill in the middle of a save, or a copy."""
  states = make_states(0)
  Checkpoints(tmp_path, keep=3).save(states, progress(1))
  half_written(tmp_path, name)
  reader, writer = Checkpoints(tmp_path), Checkpoints(tmp_path, keep=3)
  for checkpoints in (reader, writer):
    restored = checkpoints.restore(template())
    assert (restored.step, restored.progress) == (7, progress(1))
    assert_same(restored.states, states)
  assert writer.steps() == [7]
  # Orbax saves no step below the newest: what is damaged must not count.
  for number, versions in ((8, (4, 4)), (9, (4, 5))):
    later = make_states(number, versions)
    assert writer.save(later, progress(2)) == number
    restored = Checkpoints(tmp_path).restore(template())
    assert (restored.step, restored.progress) == (number, progress(2))
    assert_same(restored.states, later)


def test_without_a_whole_step_nothing_is_touched(tmp_path):
  """Catches checkpoints that are set aside because the configuration does not fit them."""
  for name in ('7', '9'):
    half_written(tmp_path, name)
  for checkpoints in (Checkpoints(tmp_path), Checkpoints(tmp_path, keep=3)):
    with pytest.raises(FileNotFoundError, match=r'no checkpoint of \[9, 7\] in .* is whole'):
      checkpoints.restore(template())
    assert checkpoints.steps() == [7, 9]


def test_a_missing_step_is_named_with_those_there_are(tmp_path):
  """Catches the newest step taken for one that was asked for."""
  with pytest.raises(FileNotFoundError, match='there are none'):
    Checkpoints(tmp_path).restore(template())
  assert not (tmp_path / FOLDER).exists(), 'a reader made a folder'
  checkpoints = Checkpoints(tmp_path, keep=3)
  assert checkpoints.steps() == []
  checkpoints.save(make_states(0), progress(1))
  with pytest.raises(FileNotFoundError, match=r'no checkpoint 6 in .*; there are \[7\]'):
    Checkpoints(tmp_path).restore(template(), 6)


def test_a_network_of_another_shape_is_refused(tmp_path):
  """Catches parameters that are cut or padded to fit."""
  Checkpoints(tmp_path, keep=3).save(make_states(0), progress(1))
  config = make_config()
  config.model.mlp_layers = (5,)
  other = jax.eval_shape(lambda: initial_states(config, ENV))
  with pytest.raises(ValueError, match=r'shape \(4, 6\) where the configuration has \(5, 6\)'):
    Checkpoints(tmp_path).restore(other)


def test_a_step_below_the_newest_is_not_lost_in_silence(tmp_path):
  """Catches a save that Orbax skips and that counts as made."""
  checkpoints = Checkpoints(tmp_path, keep=3)
  checkpoints.save(make_states(0), progress(1))
  with pytest.raises(ValueError, match=r'step 5 is below the newest of \[7\]'):
    checkpoints.save(make_states(1, (2, 3)), progress(1))
