"""The configuration: every field is a flag, comes back from a file, and is checked with a fix."""

import contextlib
import enum
import itertools
import json
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags

from sfjax import config as config_lib
from sfjax.command_line import define_config
from sfjax.config import (
  Config,
  Core,
  Encoder,
  RatioRange,
  check_encoder,
  check_types,
  resolve,
  validate,
)
from sfjax.fields import field_types, from_dict, get_field, to_dict
from sfjax.specs import ArraySpec, array_spec

ROOT = Path(__file__).parent.parent
FILES = ('configs/doom.py', 'configs/doom.py:deadly_corridor', 'configs/cartpole.py')


def parse(file: str, *overrides: str) -> Config:
  """Reads a configuration file as `launch.py` does, with flags of its own."""
  values = flags.FlagValues()
  argv = ['launch.py', f'--config={ROOT}/{file}', *(f'--config.{text}' for text in overrides)]
  define_config(values, argv)
  assert values(argv) == ['launch.py']
  return values.config


def is_optional(hint: Any) -> bool:
  return isinstance(hint, types.UnionType)


def value_types() -> dict[str, Any]:
  """The type of every field, of an optional one without None."""
  found = {}
  for path, hint in field_types(Config).items():
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    found[path] = args[0] if is_optional(hint) else hint
  return found


def other_value(hint: Any, value: Any) -> tuple[str, Any]:
  """A value that a field does not have, as text and as it should arrive."""
  if typing.get_origin(hint) is dict:
    return '{"width": 3, "names": ["a"]}', {'width': 3, 'names': ['a']}
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    other = next(member for member in hint if member is not value)
    return other.value, other
  if typing.get_origin(hint) is tuple:
    return '7,8,9', (7, 8, 9)
  return {
    bool: (str(not value), not value),
    int: ('37', 37),
    float: ('3', 3.0),
    str: ('CartPole-v1', 'CartPole-v1'),
  }[hint]


def test_every_field_is_a_flag_of_its_type():
  """Catches a field that ml_collections cannot override or leaves as text, as dictionaries are."""
  hints, default = value_types(), parse('configs/doom.py')
  assert len(hints) > 40
  overrides, expected = [], {}
  for path in hints:
    text, expected[path] = other_value(hints[path], get_field(default, path))
    overrides.append(f'{path}={text}')
  config = parse('configs/doom.py', *overrides)
  for path, value in expected.items():
    assert get_field(config, path) == value != get_field(default, path), path
    assert type(get_field(config, path)) is type(value), path


def test_every_optional_field_can_be_made_automatic_again():
  """Catches an optional field that keeps, once the file has set it, a number for ever."""
  optional = [path for path, hint in field_types(Config).items() if is_optional(hint)]
  assert len(optional) > 5
  config = parse('configs/cartpole.py', *(f'{path}=7' for path in optional))
  assert {get_field(config, path) for path in optional} == {7}
  config = parse('configs/cartpole.py', *(f'{path}=None' for path in optional))
  assert {get_field(config, path) for path in optional} == {None}
  with pytest.raises(ValueError, match='train.seed is None; it must be an integer'):
    check_types(parse('configs/cartpole.py', 'train.seed=None'))


@pytest.mark.parametrize(
  'path, value, problem',
  (
    ('learner.batch_size', '512', "is '512'; it must be an integer"),
    ('learner.batch_size', 512.0, 'is 512.0; it must be an integer'),
    ('train.seed', True, 'is True; it must be an integer'),
    ('loss.gamma', '0.9', "is '0.9'; it must be a number"),
    ('sampler.num_workers', '4', "is '4'; it must be an integer or None"),
    ('model.core', 'gru', "is 'gru'; it must be Core.NONE or Core.GRU or Core.LSTM"),
    ('model.mlp_layers', [64, 64], 'is [64, 64]; it must be a tuple, each item an integer'),
    ('model.mlp_layers', (64, '64'), "is (64, '64'); it must be a tuple, each item an integer"),
    ('env.kwargs', {'size': {1}}, "is {'size': {1}}; it must be a dictionary of texts to JSON"),
    ('env.kwargs', {1: 1}, 'is {1: 1}; it must be a dictionary of texts to JSON values'),
    ('env.name', None, 'is None; it must be a text'),
    ('train', 3, 'is 3; it must be a TrainConfig'),
  ),
)
def test_a_value_of_another_type_in_a_file_is_told(path, value, problem):
  """Catches a TypeError from a comparison, and 0.9 as text that reaches the compiler."""
  config = Config()
  section, _, name = path.rpartition('.')
  setattr(get_field(config, section) if section else config, name, value)
  for check in (check_types, validate):
    with pytest.raises(ValueError) as caught:
      check(config)
    assert str(caught.value).startswith(f'  {path} {problem}')
  config = Config()
  config.loss.gamma = 1  # An integer is a number.
  check_types(config)


@pytest.mark.parametrize(
  'override',
  ('train.seed=1.5', 'learner.microbatch=many', 'model.core=rnn', 'loss.use_clip=perhaps'),
)
def test_a_value_of_another_type_is_refused_with_its_flag(override):
  """Catches a value that is cut to fit."""
  with pytest.raises(flags.IllegalFlagValueError, match=f'flag --config.{override}: '):
    parse('configs/doom.py', override)


def test_a_misspelt_field_in_a_file_is_an_error():
  """Catches sections without slots, which take any name."""
  for path in (
    '',
    'env',
    'sampler',
    'model',
    'loss',
    'learner',
    'inference',
    'train',
    'checkpoint',
  ):
    section = get_field(Config(), path) if path else Config()
    with pytest.raises(AttributeError):
      setattr(section, 'no_such_field', 1)  # noqa: B010


@pytest.mark.parametrize('file', FILES)
def test_a_configuration_comes_back_from_its_file(file):
  """Catches enums, tuples or None that do not survive JSON."""
  config = parse(file)
  config.env.kwargs = {'width': 3, 'size': (72, 128)}
  for resolved in (False, True):
    if resolved:
      resolve(config, cpus=3, cpus_reason='a test', accelerator=False)
    data = to_dict(config)
    assert json.loads(json.dumps(data)) == data
    back = from_dict(data, Config)
    assert back.env.kwargs == {'width': 3, 'size': [72, 128]}
    back.env.kwargs = config.env.kwargs
    assert back == config
    assert isinstance(back.model.mlp_layers, tuple) and back.model.decoder_layers == ()
    assert isinstance(back.model.encoder, Encoder) and isinstance(back.model.core, Core)
  validate(config)


def test_a_field_of_another_version_is_named():
  """Catches an old run folder that is read with a field left out."""
  data = to_dict(Config())
  data['train']['gone'] = 1
  with pytest.raises(ValueError, match=r"TrainConfig has no fields \['gone'\]"):
    from_dict(data, Config)


def valid_config() -> Config:
  config = Config()
  resolve(config, cpus=4, cpus_reason='a test', accelerator=False)
  validate(config)
  return config


def problems(config: Config) -> list[str]:
  with pytest.raises(ValueError) as caught:
    validate(config)
  return [line.strip() for line in str(caught.value).splitlines()]


def test_all_problems_are_told_together_each_with_the_fix():
  """Catches a check that stops at the first problem."""
  config = valid_config()
  config.learner.batch_size = 2000
  config.sampler.envs_per_worker = 5
  config.loss.gamma = 1.01
  config.train.seed = -1
  config.learner.learning_rate = float('nan')
  config.env.reward_scale = float('nan')
  config.model.mlp_layers, config.model.decoder_layers = (64, 0), (-1,)
  config.model.conv_dense_layers = (0,)
  assert sorted(problems(config)) == sorted([
    'learner.batch_size 2000 is not a multiple of learner.rollout 32; use 1984 or 2016',
    'sampler.envs_per_worker 5 is not a multiple of sampler.num_splits 2; use 4 or 6',
    'loss.gamma is 1.01; it must be between 0 and 1',
    'train.seed is -1; it must be 0 or more',
    'learner.learning_rate is nan; it must be above 0',
    'env.reward_scale is nan; it must be a number',
    'model.mlp_layers is (64, 0); every size must be above 0',
    'model.decoder_layers is (-1,); every size must be above 0',
    'model.conv_dense_layers is (0,); every size must be above 0',
  ])  # fmt: skip


@pytest.mark.parametrize('path', [*config_lib._POSITIVE, *config_lib._NOT_NEGATIVE])
def test_every_limit_is_checked_and_says_the_number(path):
  """Catches a limit that lets its own end through, or crashes where a number is 0."""
  config = valid_config()
  section, name = path.split('.')
  value = 0 if path in config_lib._POSITIVE else -1
  setattr(getattr(config, section), name, value)
  limit = 'above 0' if value == 0 else '0 or more'
  assert f'{path} is {value}; it must be {limit}' in problems(config)


def test_every_number_has_a_limit_or_is_meant_to_have_none():
  """Catches a new field that nobody checks."""
  limits = {*config_lib._POSITIVE, *config_lib._NOT_NEGATIVE, *config_lib._FRACTIONS}
  limits |= set(config_lib._BELOW_1)
  numbers = {path for path, hint in value_types().items() if hint in (int, float)}
  assert numbers - limits == {'env.reward_scale', 'train.stop_at_return'}
  assert limits <= numbers


def test_fixes_are_themselves_valid():
  """Catches a proposal that would be refused in its turn: for 20 < 32, that is 0."""
  for batch in (20, 33, 2000):
    config = valid_config()
    config.learner.batch_size = batch
    (problem,) = problems(config)
    for proposal in problem.partition('; use ')[2].split(' or '):
      config.learner.batch_size = int(proposal)
      validate(config)
  # 33 · 1024 / 32 = 1056 = 2⁵ · 3 · 11 observations: 48 and 66 are the divisors around 50.
  config = valid_config()
  config.learner.microbatch = 50
  (problem,) = problems(config)
  assert problem.startswith('learner.microbatch 50 does not divide the 1056 observations')
  assert problem.endswith('use 48 or 66')
  config.learner.microbatch = 2000
  assert problems(config) == [
    'learner.microbatch 2000 does not divide the 1056 observations of a minibatch ((rollout + 1) · '
    'batch_size / rollout / minibatches); use 1056'
  ]
  for divisor in (1, 48, 66, 1056):
    config.learner.microbatch = divisor
    validate(config)


@pytest.mark.parametrize(
  ('options', 'proposals'),
  (
    # 1024 / 32 = 32 trajectories.
    ({'learner.minibatches': 3}, {'learner.minibatches': (2, 4)}),
    ({'learner.minibatches': 99}, {'learner.minibatches': (32,)}),
    ({'learner.bptt': 12}, {'learner.bptt': (8, 16)}),
    ({'learner.bptt': 8, 'model.core': Core.NONE}, {'learner.bptt': (None,)}),
    ({'learner.max_kl': 0.1}, {'learner.epochs': (2,)}),
    (
      {'loss.ratio_range': RatioRange.SYMMETRIC, 'loss.clip_ratio': 1.0},
      {'loss.clip_ratio': (0.9,)},
    ),
    # (32 + 1) · 32 / 4 = 264 = 2³ · 3 · 11 observations in a minibatch.
    ({'learner.minibatches': 4, 'learner.microbatch': 32}, {'learner.microbatch': (24, 33)}),
  ),
)
def test_updates_on_a_batch_fit_it_or_the_fix_is_told(options, proposals):
  """Catches samples that no update sees, and options that would do nothing or harm in silence."""
  config = valid_config()
  for path, value in options.items():
    set_field(config, path, value)
  (problem,) = problems(config)
  ((path, values),) = proposals.items()
  assert path in problem
  for value in values:
    assert value is None or isinstance(value, float) or str(value) in problem
    set_field(config, path, value)
    validate(config)


def set_field(config: Config, path: str, value: object) -> None:
  section, name = path.split('.')
  setattr(getattr(config, section), name, value)


def test_a_distribution_is_stored_only_where_its_kl_is_needed():
  """Catches a penalty or a limit without the numbers it needs, and memory for nothing."""
  config = valid_config()
  assert not config_lib.needs_behaviour_params(config)
  config.loss.kl_coef = 0.1
  assert config_lib.needs_behaviour_params(config)
  config.loss.kl_coef, config.learner.max_kl = 0.0, 0.02
  assert config_lib.needs_behaviour_params(config)


def test_more_policies_than_environments_are_refused():
  config = valid_config()
  config.sampler.num_workers, config.sampler.envs_per_worker = 2, 2
  config.train.num_policies = 4
  validate(config)
  config.train.num_policies = 5
  assert problems(config) == [
    'train.num_policies 5 is more than the 4 environments; every policy needs one'
  ]


@pytest.mark.parametrize('accelerator, cpus, count', ((True, 6, 6), (False, 6, 3), (False, 1, 1)))
def test_automatic_sizes_are_explained(accelerator, cpus, count):
  """Catches a size without its reason, and one of the user that is written over."""
  config = Config()
  config.learner.num_threads = 7
  lines = resolve(config, cpus=cpus, cpus_reason='cgroup quota', accelerator=accelerator)
  share = 'all' if accelerator else 'half'
  reason = f'{share} of the {cpus} usable CPUs (cgroup quota)'
  assert f'sampler.num_workers = {count}: {reason}' in lines
  assert not any('num_threads' in line for line in lines)
  assert (config.sampler.num_workers, config.learner.num_threads) == (count, 7)
  assert resolve(config, cpus=99, cpus_reason='a test', accelerator=False) == []
  assert config.sampler.num_workers == count
  validate(config)


def test_an_encoder_fits_the_observations_or_says_which_does():
  """Catches an error from deep inside the network, or a network that sees nothing."""
  config = Config()
  config.env.name = 'Some-v0'
  vector = {'speed': array_spec(np.float32, 4)}

  def image(*shape: int) -> dict[str, ArraySpec]:
    return {'camera': array_spec(np.uint8, *shape)}

  check_encoder(config, image(36, 36, 3))
  check_encoder(config, image(36, 36, 3) | vector)
  with pytest.raises(ValueError, match=r'\(35, 100, 3\) \(camera\); .* conv_simple needs 36 × 36'):
    check_encoder(config, vector | image(35, 100, 3))
  with pytest.raises(ValueError, match=r'conv_simple and Some-v0 .* \(4,\) \(speed\); use mlp'):
    check_encoder(config, vector)
  config.model.encoder = Encoder.RESNET
  check_encoder(config, image(1, 1, 3))
  config.model.encoder = Encoder.MLP
  check_encoder(config, vector)
  with pytest.raises(
    ValueError, match=r'encoder is mlp .* \(9, 9, 3\) \(camera\); use conv_simple, '
  ):
    check_encoder(config, vector | image(9, 9, 3))


@pytest.mark.parametrize('value', (0, -1))
def test_no_number_stops_the_checks_themselves(value):
  """Catches a division by a number that is only checked later, in any way to size a run."""
  numbers = [path for path, hint in value_types().items() if hint in (int, float)]
  for path, synchronous, envs in itertools.product(numbers, (False, True), (None, 8)):
    config = Config()
    config.train.synchronous, config.sampler.num_envs = synchronous, envs
    section, name = path.split('.')
    setattr(getattr(config, section), name, value)
    resolve(config, cpus=4, cpus_reason='a test', accelerator=False)
    with contextlib.suppress(ValueError):
      validate(config)
