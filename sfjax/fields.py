"""The fields of a configuration as data: paths, types, plain JSON values.

Works on any tree of dataclasses; `sfjax.config` has the one of a run. Free of jax.
"""

import dataclasses
import enum
import json
import types
import typing
from typing import Any

_NOUNS = {int: 'an integer', float: 'a number', bool: 'True or False', str: 'a text'}


def is_section(hint: Any) -> bool:
  """Whether a field of this type holds further fields."""
  return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def field_types(cls: type, prefix: str = '') -> dict[str, Any]:
  """The declared type of every field, by dotted path."""
  found = {}
  for name, hint in typing.get_type_hints(cls).items():
    found |= field_types(hint, f'{prefix}{name}.') if is_section(hint) else {prefix + name: hint}
  return found


def get_field(config: Any, path: str) -> Any:
  """Returns the field at a dotted path."""
  value = config
  for name in path.split('.'):
    value = getattr(value, name)
  return value


def wrong_types(section: Any, prefix: str = '') -> list[str]:
  """A line for each field whose value is not of its declared type, with what it must be.

  Flags have their types; this is for values that a configuration file or a script assigned.
  """
  problems = []
  for name, hint in typing.get_type_hints(type(section)).items():
    value, path = getattr(section, name), prefix + name
    if is_section(hint) and isinstance(value, hint):
      problems += wrong_types(value, f'{path}.')
    elif not _fits(value, hint):
      problems.append(f'{path} is {value!r}; it must be {_noun(hint)}')
  return problems


def _fits(value: Any, hint: Any) -> bool:
  args = typing.get_args(hint)
  if isinstance(hint, types.UnionType):
    return any(_fits(value, arg) for arg in args)
  if typing.get_origin(hint) is tuple:
    return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
  if typing.get_origin(hint) is dict:
    return isinstance(value, dict) and _is_json(value)
  if isinstance(value, bool):  # Python counts it among the integers.
    return hint is bool
  return isinstance(value, (int, float) if hint is float else hint)


def _is_json(value: dict[Any, Any]) -> bool:
  try:
    json.dumps(value)
  except (TypeError, ValueError):
    return False
  return all(isinstance(name, str) for name in value)


def _noun(hint: Any) -> str:
  if isinstance(hint, types.UnionType):
    return ' or '.join(_noun(arg) for arg in typing.get_args(hint))
  if typing.get_origin(hint) is tuple:
    return f'a tuple, each item {_noun(typing.get_args(hint)[0])}'
  if typing.get_origin(hint) is dict:
    return 'a dictionary of texts to JSON values'
  if hint is type(None):
    return 'None'
  if issubclass(hint, enum.Enum):
    return ' or '.join(f'{hint.__name__}.{member.name}' for member in hint)
  return _NOUNS.get(hint, f'a {hint.__name__}')


def to_dict(config: Any) -> dict[str, Any]:
  """Returns a configuration as plain JSON values."""

  def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
      return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
      return value.value
    if isinstance(value, dict):
      return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value

  return plain(config)


def from_dict(data: dict[str, Any], cls: type) -> Any:
  """Rebuilds a configuration of class `cls` from `to_dict`.

  Raises:
    ValueError: a field is unknown, as in a file of another version.
  """
  hints = typing.get_type_hints(cls)
  unknown = set(data) - set(hints)
  if unknown:
    raise ValueError(f'{cls.__name__} has no fields {sorted(unknown)}')
  return cls(**{name: _restore(value, hints[name]) for name, value in data.items()})


def _restore(value: Any, hint: Any) -> Any:
  if isinstance(hint, types.UnionType):
    hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
  if value is None:
    return None
  if is_section(hint):
    return from_dict(value, hint)
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    return hint(value)
  return tuple(value) if typing.get_origin(hint) is tuple else value
