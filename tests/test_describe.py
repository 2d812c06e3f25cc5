"""The configuration for people: what each field means, who set it, and why it is what it is."""

import dataclasses
from pathlib import Path

import pytest

from sfjax.config import Config
from sfjax.describe import meanings, set_by
from sfjax.fields import field_types, to_dict
from sfjax.training import show

DOOM = Path(__file__).parent.parent / 'configs/doom.py'


@dataclasses.dataclass
class Inner:
  """A section."""

  last: tuple[int, ...] = (  # Beside a value
    1,  # of several lines.
  )


@dataclasses.dataclass
class Outer:
  """A configuration."""

  first: str = '# no comment'  # Beside: with a # inside.
  # Above,
  # in two lines.
  second: int = 2
  silent: int = 3
  inner: Inner = dataclasses.field(default_factory=Inner)  # A section has no meaning of its own.


def test_a_meaning_is_the_comment_beside_a_field_or_above_it():
  """Catches a comment of the neighbour, one inside a text, and one that is lost."""
  assert meanings(Outer) == {
    'first': 'Beside: with a # inside.',
    'second': 'Above, in two lines.',
    'silent': '',
    'inner.last': 'Beside a value of several lines.',
  }


def test_every_field_has_a_meaning():
  """Catches a new field that nobody explains; one word, or one letter, explains nothing."""
  found = meanings()
  assert list(found) == list(field_types(Config))
  assert [path for path, text in found.items() if len(text) < 12] == []


def test_who_set_a_field():
  """Catches a flag with the default's value that counts as none, and a file's that hides one."""
  config = Config()
  config.train.seed, config.loss.gamma, config.env.frameskip = 5, 0.9, 4
  sources = set_by(config, {'train.seed', 'learner.epochs'})
  assert {path: source for path, source in sources.items() if source != 'default'} == {
    'train.seed': 'flag',
    'learner.epochs': 'flag',
    'loss.gamma': 'file',
    'env.frameskip': 'file',
  }
  assert list(sources) == list(field_types(Config))


def rows(text: str) -> dict[str, list[str]]:
  """The cells of each line by its first: columns are two or more spaces apart."""
  lines = [[cell for cell in line.split('  ') if cell] for line in text.splitlines()]
  return {line[0]: [cell.strip() for cell in line[1:]] for line in lines}


def test_the_table_has_every_field_resolved(capsys):
  """Catches a field left out, a value before `resolve`, and an automatic one without its reason."""
  config = Config(name='table')
  config.env.kwargs = {'time_limit': 7}
  config.sampler.num_splits = 1
  assert show(config, flags={'sampler.num_splits', 'sampler.num_workers'}) == 0
  printed = capsys.readouterr()
  assert printed.err == ''
  found = rows(printed.out)
  assert list(found)[1:] == list(field_types(Config))
  assert found['field'] == ['value', 'type', 'default', 'set by', 'meaning']
  assert found['name'][:4] == ['table', 'str', 'run', 'file']
  assert found['env.kwargs'][:4] == ['{"time_limit": 7}', 'JSON', '{}', 'file']
  assert found['model.core'][:4] == ['gru', 'none|gru|lstm', 'gru', 'default']
  assert found['model.mlp_layers'][:4] == ['128,128', 'ints', '128,128', 'default']
  assert found['train.max_seconds'][:4] == ['None', 'float or None', 'None', 'default']
  assert found['sampler.num_splits'][:4] == ['1', 'int', '2', 'flag']
  # A flag gave None: the value is the machine's.
  workers = found['sampler.num_workers']
  assert workers[:4] == [str(config.sampler.num_workers), 'int or None', 'None', 'automatic']
  assert 'usable CPUs (' in workers[4].partition('(Here: ')[2]


def test_a_configuration_that_does_not_work_is_shown_with_its_problems(capsys):
  """Catches a table that hides what is wrong, or a fault that hides the table."""
  config = Config()
  config.learner.batch_size = 1000
  assert show(config) == 2
  printed = capsys.readouterr()
  assert rows(printed.out)['learner.batch_size'][0] == '1000'
  assert 'use 992 or 1024' in printed.err
  config = Config()
  config.sampler.num_envs = '16'  # pyright: ignore[reportAttributeAccessIssue]
  assert show(config) == 2
  assert "sampler.num_envs is '16'; it must be an integer or None" in capsys.readouterr().err


@pytest.mark.parametrize('names', [(), ('a',), ('a', 'b')])
def test_options_are_compared_by_value(names):
  """Catches an option that counts as set because it is another object."""
  config = Config()
  config.env.kwargs = {name: 1 for name in names}
  assert set_by(config, ())['env.kwargs'] == ('file' if names else 'default')
  assert to_dict(config)['env']['kwargs'] == config.env.kwargs
