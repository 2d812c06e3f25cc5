"""From Gymnasium spaces to specs, and from stored actions back to members."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from sfjax.specs import (
  MASK,
  ActionSpec,
  EnvSpec,
  action_decoder,
  action_spec,
  array_spec,
  continuous,
  discrete,
  env_spec,
  random_action,
  split_obs,
  to_env_units,
)

f32 = partial(np.array, dtype=np.float32)

PIXELS = spaces.Box(0, 255, (72, 128, 3), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (5,), np.float64)


def decode(space: spaces.Space, actions, *, squash: bool = False):
  spec = action_spec(space, squash=squash)
  return action_decoder(space, spec)(np.asarray(actions, spec.stored.dtype))


def test_description_of_every_kind_of_space():
  """Catches parts in another order than the space's, and the number of a Discrete with a start."""
  assert action_spec(spaces.Discrete(4, start=-2)) == discrete(4)
  assert action_spec(spaces.MultiDiscrete([3, 2])) == discrete(3, 2)
  assert action_spec(spaces.MultiBinary(3)) == discrete(2, 2, 2)
  box = spaces.Box(f32([[-1, 0], [-np.inf, 2]]), f32([[1, 4], [np.inf, 3]]))
  assert action_spec(box) == continuous([-1, 0, -np.inf, 2], [1, 4, np.inf, 3])
  mixed = spaces.Tuple((spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(3), spaces.MultiBinary([1, 2])))
  assert action_spec(mixed) == ActionSpec((3, 2, 2), (0.0,), (1.0,))
  named = spaces.Dict({'b': spaces.Discrete(5), 'a': spaces.Tuple((spaces.Discrete(7),))})
  assert action_spec(named) == discrete(7, 5)
  assert action_spec(spaces.Box(0.0, 1.0, (1,)), squash=True).squash


def test_sizes_of_a_description():
  """Catches a deviation without a parameter, and choices stored with a fraction."""
  spec = ActionSpec((3, 2), (-1.0,), (3.0,))
  assert (spec.num_choices, spec.num_dims, spec.size) == (2, 1, 3)
  assert (spec.num_logits, spec.num_params) == (5, 7)
  assert spec.stored == array_spec(np.float32, 3)
  assert spec.half_widths == (2.0,)
  assert discrete(4).stored == array_spec(np.int32, 1)
  assert hash(spec) == hash(ActionSpec((3, 2), (-1.0,), (3.0,)))


def test_members_by_hand():
  """Catches a start left out, a wrong type or shape, and a part read from another's column."""
  assert decode(spaces.Discrete(4, start=-2), [[0], [3]]) == [-2, 1]
  assert type(decode(spaces.Discrete(4), [[1]])[0]) is int
  (member,) = decode(
    spaces.MultiDiscrete(np.array([[3, 2]]), np.int16, start=np.array([[5, -1]])), [[2, 0]]
  )
  np.testing.assert_array_equal(member, [[7, -1]])
  assert member.dtype == np.int16
  space = spaces.Dict(
    {
      'b': spaces.Tuple((spaces.Box(-1.0, 1.0, (2,), np.float64), spaces.Discrete(3, start=1))),
      'a': spaces.MultiBinary(2),
      'c': spaces.Box(0.0, 4.0, ()),
    }
  )
  # Columns: two binary choices, the Discrete, then the two boxes.
  (member,) = decode(space, [[1, 0, 2, 0.5, -7.0, 9.0]])
  np.testing.assert_array_equal(member['a'], [1, 0])
  np.testing.assert_array_equal(member['b'][0], [0.5, -1.0])
  assert member['b'][1] == 3 and type(member['b'][1]) is int
  assert member['c'] == 4.0 and member['c'].shape == () and member['c'].dtype == np.float32
  assert space.contains(member)


def test_squashing_reaches_from_bound_to_bound():
  """Catches the wrong centre or width, clipping in place of squashing, and a step over a bound."""
  space = spaces.Box(f32([-2.0, 0.1]), f32([4.0, 0.3]))
  spec = action_spec(space, squash=True)
  stored = f32([[0.0, 0.0], [0.5, -0.5], [1e4, 1e4], [-1e4, -1e4]])
  # tanh 0.5 = 0.462117: 1 + 3 · 0.462117 = 2.386351; 0.2 - 0.1 · 0.462117 = 0.153788.
  expected = [[1.0, 0.2], [2.386351, 0.153788], [4.0, 0.3], [-2.0, 0.1]]
  np.testing.assert_allclose(to_env_units(spec, stored), expected, rtol=1e-5)
  members = decode(space, stored, squash=True)
  assert all(space.contains(member) for member in members)
  assert members[2][1] == space.high[1]
  # Of any leading axes, and the stored actions stay.
  np.testing.assert_allclose(to_env_units(spec, stored[None])[0], expected, rtol=1e-5)
  assert stored[2, 0] == 1e4


def test_squashing_needs_bounds():
  """Catches an infinite width, which would make every log-probability NaN, or a zero one."""
  with pytest.raises(ValueError, match='dimension 1.*finite bounds'):
    action_spec(spaces.Box(f32([0, 0]), f32([1, np.inf])), squash=True)
  with pytest.raises(ValueError, match='dimension 0'):
    continuous([1.0], [1.0], squash=True)
  widest = float(np.finfo(np.float64).max)
  assert action_spec(spaces.Box(-widest, widest, (1,), np.float64), squash=True).half_widths == (
    widest,
  )


def test_impossible_descriptions_are_refused():
  """Catches a description that only fails inside a device program."""
  for choices, low, high in (((), (), ()), ((0,), (), ()), ((), (0.0,), ()), ((), (2.0,), (1.0,))):
    with pytest.raises(ValueError):
      ActionSpec(choices, low, high)


def bounds(draw) -> tuple[np.ndarray, np.ndarray]:
  """Bounds of a box: finite ones, half open ones, open ones, and a width of zero."""
  shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
  number = st.floats(-1e3, 1e3, width=32)
  size = int(np.prod(shape))
  ends = draw(st.lists(st.tuples(number, number), min_size=size, max_size=size))
  low, high = f32([sorted(pair) for pair in ends]).T
  low[draw(st.lists(st.integers(0, size - 1), max_size=2))] = -np.inf
  high[draw(st.lists(st.integers(0, size - 1), max_size=2))] = np.inf
  return low.reshape(shape), high.reshape(shape)


@st.composite
def leaves(draw) -> spaces.Space:
  kind = draw(st.sampled_from(['discrete', 'multi', 'binary', 'box', 'squashable']))
  if kind == 'discrete':
    return spaces.Discrete(draw(st.integers(1, 9)), start=draw(st.integers(-5, 2**40)))
  if kind == 'multi':
    shape = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    n = np.array(draw(st.lists(st.integers(1, 5), min_size=4, max_size=4)))
    start = np.full(shape, draw(st.integers(-9, 9)))
    return spaces.MultiDiscrete(n[: int(np.prod(shape))].reshape(shape), np.int16, start=start)
  if kind == 'binary':
    return spaces.MultiBinary(draw(st.sampled_from([1, 3, [2, 2]])))
  dtype = draw(st.sampled_from([np.float32, np.float64]))
  if kind == 'box':
    low, high = bounds(draw)
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
  low = draw(st.floats(-1e3, 1e3, width=32))
  return spaces.Box(low, low + draw(st.floats(0.125, 10.0, width=32)), (2,), dtype)


action_spaces = st.recursive(
  leaves(),
  lambda inner: (
    st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts)))
    | st.dictionaries(st.sampled_from('cab'), inner, min_size=1).map(spaces.Dict)
  ),
  max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(space=action_spaces, squash=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_every_stored_action_is_a_member(space: spaces.Space, squash: bool, seed: int):
  """Catches a member of the wrong type, shape, dtype or range, for any product of spaces."""
  try:
    spec = action_spec(space, squash=squash)
  except ValueError:
    assert squash
    spec = action_spec(space)
  rng = np.random.default_rng(seed)
  actions = np.zeros((4, spec.size), spec.stored.dtype)
  actions[1:, : spec.num_choices] = rng.integers(spec.choices, size=(3, spec.num_choices))
  actions[1:, spec.num_choices :] = rng.normal(size=(3, spec.num_dims)) * [[1], [100], [1e6]]
  before = actions.copy()
  decoder = action_decoder(space, spec)
  for member in decoder(actions):
    assert space.contains(member)
  assert space.contains(decoder(random_action(spec, rng)[None])[0])
  np.testing.assert_array_equal(actions, before)


def test_members_do_not_share_memory_with_the_mailbox():
  """Catches an environment that keeps its last action and finds the next one in its place."""
  for space in (spaces.MultiDiscrete([3, 3], np.int32), spaces.Box(-1.0, 1.0, (2,), np.float64)):
    actions = np.ones((1, 2), action_spec(space).stored.dtype)
    (member,) = action_decoder(space, action_spec(space))(actions)
    actions[:] = 0
    np.testing.assert_array_equal(member, [1, 1])


def test_a_decoder_of_another_space_is_refused():
  """Catches an environment whose spaces differ from those of the one that was asked first."""
  with pytest.raises(ValueError, match='was expected'):
    action_decoder(spaces.Discrete(3), discrete(4))


def test_random_actions_are_uniform_where_that_means_something():
  """Catches an alternative never drawn, a forbidden one drawn, and squashing left out."""
  rng = np.random.default_rng(0)
  spec = ActionSpec((3, 2), (-2.0,), (4.0,), squash=True)
  actions = np.stack([random_action(spec, rng) for _ in range(4000)])
  for i, size in enumerate(spec.choices):
    frequencies = np.bincount(actions[:, i].astype(int), minlength=size) / 4000
    # Standard deviation of a frequency: at most sqrt(1/4 / 4000) = 0.008; four of them.
    np.testing.assert_allclose(frequencies, 1 / size, atol=0.032)
  x = to_env_units(spec, actions)[:, 2]
  # Uniform on [-2, 4]: mean 1, deviation 6 / sqrt 12 = 1.732; standard errors 0.03 and 0.02.
  assert x.mean() == pytest.approx(1.0, abs=0.11)
  assert x.std() == pytest.approx(1.732, abs=0.07)
  mask = np.array([False, True, False, False, False])
  masked = np.stack([random_action(spec, rng, mask) for _ in range(50)])
  assert set(masked[:, 0]) == {1.0} and set(masked[:, 1]) == {0.0, 1.0}
  one_sided = continuous([-np.inf, 2.0, -np.inf], [np.inf, np.inf, -3.0])
  drawn = np.stack([random_action(one_sided, rng) for _ in range(50)])
  assert np.isfinite(drawn).all() and drawn[:, 1].min() >= 2 and drawn[:, 2].max() <= -3


def test_plain_observations():
  """Catches a dtype that the slab would have to convert twice, and the key under another name."""
  spec = env_spec(PIXELS, spaces.Discrete(4))
  assert spec == EnvSpec({'obs': array_spec(np.uint8, 72, 128, 3)}, discrete(4))
  assert env_spec(VECTOR, spaces.Discrete(4)).obs == {'obs': array_spec(np.float32, 5)}
  obs = np.zeros(5)
  assert split_obs(spec, obs)[0]['obs'] is obs and split_obs(spec, obs)[1] is None


MASKED = spaces.Dict({'image': PIXELS, 'vector': VECTOR, MASK: spaces.MultiBinary(5)})


def test_dictionary_observations_and_their_mask():
  """Catches a mask that is fed to the network as an observation, or is none though given."""
  spec = env_spec(MASKED, spaces.MultiDiscrete([3, 2]))
  expected = {'image': array_spec(np.uint8, 72, 128, 3), 'vector': array_spec(np.float32, 5)}
  assert spec == EnvSpec(expected, discrete(3, 2), mask_size=5)
  sample = MASKED.sample()
  sample[MASK] = np.array([1, 0, 0, 2, 1], np.int8)
  obs, mask = split_obs(spec, sample)
  assert list(obs) == ['image', 'vector'] and obs['image'] is sample['image']
  np.testing.assert_array_equal(mask, [True, False, False, True, True])
  assert mask is not None and mask.dtype == bool
  # Only a space with choices has a use for a mask; of another it is an observation.
  named_alike = spaces.Dict({MASK: VECTOR})
  spec = env_spec(named_alike, spaces.Box(0.0, 1.0, (2,)))
  assert spec.obs == {MASK: array_spec(np.float32, 5)} and spec.mask_size == 0
  assert split_obs(spec, named_alike.sample())[1] is None
  assert env_spec(spaces.Dict({'a': VECTOR}), spaces.Discrete(2)).mask_size == 0


@pytest.mark.parametrize(
  'observation, action, said',
  [
    (spaces.Discrete(3), spaces.Discrete(3), 'observation space Discrete'),
    (VECTOR, spaces.Box(0, 5, (2,), np.int32), 'action space Box'),
    (VECTOR, spaces.Tuple((spaces.Discrete(2), spaces.Text(3))), 'action space Text'),
    (VECTOR, spaces.Tuple(()), 'without any part'),
    (spaces.Dict({'a': spaces.Dict({'b': VECTOR})}), spaces.Discrete(3), 'observation space Dict'),
    (MASKED, spaces.Discrete(4), 'for 4 alternatives'),
    (spaces.Dict({MASK: spaces.MultiBinary(3)}), spaces.Discrete(3), 'observation space Dict'),
  ],
)
def test_what_is_not_supported_is_said(observation, action, said):
  """Catches a space that is misread without a word."""
  with pytest.raises(ValueError, match=said) as error:
    env_spec(observation, action)
  assert 'Supported: observations' in str(error.value)


def test_every_problem_is_said_at_once():
  """Catches a message about the first problem only, which costs a start for each."""
  with pytest.raises(ValueError, match='Text.*observation space Discrete'):
    env_spec(spaces.Discrete(3), spaces.Text(3))


def test_workers_need_no_jax():
  """Catches an import that costs every worker 140 MB."""
  code = (
    'import sys; from gymnasium import spaces; from sfjax import specs\n'
    'space = spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (1,))))\n'
    'spec = specs.env_spec(spaces.Box(0.0, 1.0, (1,)), space, squash=True).action\n'
    'import numpy; specs.action_decoder(space, spec)(numpy.zeros((2, 2)))\n'
    'assert "jax" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
