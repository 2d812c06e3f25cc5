"""From the command line to a `Config`: the configuration file, and a flag for every field.

The flags are those of ml_collections; the file is read here, so that a mistake in it is told with
its line. Free of jax.
"""

import difflib
import inspect
import json
import os
import re
import traceback
import types
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from sfjax.config import Config
from sfjax.fields import field_types

_OPTIONS = 'env.kwargs'
_FIELD_FLAG = re.compile(r'--?(?:no)?config\.([^=]*)')


class _Number(flags.ArgumentParser):
  """A number, or None, which stands for an automatic value where a field has one."""

  def __init__(self, kind: type, noun: str) -> None:
    self._kind, self._noun = kind, noun

  def parse(self, argument: Any) -> Any:
    """Parses the text of a flag.

    Raises:
      ValueError: it is none.
    """
    if argument in (None, 'None'):
      return None
    try:
      return self._kind(argument)
    except ValueError:
      raise ValueError(f'it must be {self._noun}, or None where that is automatic') from None


class _Boolean(flags.BooleanParser):
  """True or False, as absl spells them."""

  def parse(self, argument: Any) -> bool:
    """Parses the text of a flag.

    Raises:
      ValueError: it is none.
    """
    try:
      return super().parse(argument)
    except ValueError:
      raise ValueError('it must be True or False') from None


class _Dictionary(flags.ArgumentParser):
  """A dictionary as JSON."""

  def parse(self, argument: Any) -> dict[str, Any]:
    """Parses the text of a flag, which replaces all that the configuration file has there.

    Raises:
      ValueError: it is none.
    """
    if isinstance(argument, dict):
      return argument
    try:
      value = json.loads(argument)
    except ValueError:
      value = None
    if not isinstance(value, dict):
      raise ValueError("""it must be JSON such as '{"width": 3}'""")
    return value


def define_config(flag_values: flags.FlagValues, argv: list[str]) -> None:
  """Defines --config and, of the fields of a configuration, the flags that `argv` gives.

  Raises:
    ValueError: a flag names no field.
  """
  problems = _unknown_fields(argv)
  if problems:
    raise ValueError('\n'.join(problems))
  config_flags.register_flag_parser_for_type(int, _Number(int, 'an integer'))
  config_flags.register_flag_parser_for_type(float, _Number(float, 'a number'))
  config_flags.register_flag_parser_for_type(bool, _Boolean())
  config_flags.register_flag_parser_for_type(dict, _Dictionary())
  config_flags.DEFINE_config_dataclass(
    'config',
    Config(),
    'Configuration file, with :argument if it has one.',
    flag_values=flag_values,
    sys_argv=argv,
    parse_fn=load_file,
  )


def fields_given(flag_values: flags.FlagValues) -> set[str]:
  """Paths of the fields that the command line set."""
  return set(config_flags.get_override_values(flag_values['config']))


def _unknown_fields(argv: list[str]) -> list[str]:
  """A line for each flag that names no field of a configuration, with the nearest that do."""
  known, problems = list(field_types(Config)), []
  for match in filter(None, map(_FIELD_FLAG.match, argv[1:])):
    path = match[1]
    if path in known:
      continue
    if path.startswith(f'{_OPTIONS}.'):
      option = path.removeprefix(f'{_OPTIONS}.')
      problems.append(
        f'{path}: options of an environment are given together, as JSON: '
        f"""--config.{_OPTIONS}='{{"{option}": …}}'"""
      )
      continue
    same_name = [other for other in known if other.endswith(f'.{path.rpartition(".")[2]}')]
    near = same_name or difflib.get_close_matches(path, known, cutoff=0.5)
    nearest = f'; nearest: {", ".join(near)}' if near else ''
    problems.append(f'a configuration has no field {path}{nearest}')
  return problems


def load_file(name: str) -> Config:
  """Runs `get_config` of a configuration file.

  Args:
    name: its path, followed by `:argument` for one that takes an argument.

  Raises:
    ValueError: it cannot be read, is wrong Python or makes no configuration; one line says where.
  """
  path, colon, argument = name.partition(':')
  given = [argument] if colon else []
  try:
    source = Path(path).read_text()
  except OSError as error:
    raise ValueError(f'the file cannot be read: {os.strerror(error.errno or 0)}') from error
  module = types.ModuleType('sfjax_config_file')
  module.__file__ = path
  try:
    exec(compile(source, path, 'exec'), module.__dict__)  # It leaves no __pycache__ behind.
    get_config = getattr(module, 'get_config', None)
    if not callable(get_config):
      raise _FileError('it defines no function get_config()')
    _check_argument(get_config, given)
    config = get_config(*given)
  except _FileError:
    raise
  except Exception as error:
    raise ValueError(_where(error, path)) from error
  if not isinstance(config, Config):
    raise ValueError(f'get_config() returns {type(config).__name__}, not sfjax.config.Config')
  return config


class _FileError(ValueError):
  """A configuration file that lacks what this module needs."""


def _check_argument(get_config: Any, given: list[str]) -> None:
  signature = inspect.signature(get_config).replace(return_annotation=inspect.Signature.empty)
  try:
    signature.bind(*given)
  except TypeError as error:
    fix = f'leave :{given[0]} out' if given else 'add one after the path, as in file.py:argument'
    raise _FileError(f'get_config{signature} does not fit ({error}); {fix}') from error


def _where(error: Exception, path: str) -> str:
  """The line of the file that an error comes from, and the error, in one line."""
  lines = [
    frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path
  ]
  if isinstance(error, SyntaxError) and error.filename == path:
    lines, text = [error.lineno], error.msg
  else:
    text = ' '.join(str(error).split())
  line = f'line {lines[-1]}: ' if lines else ''
  return f'{line}{type(error).__name__}: {text}'
