"""A configuration for people: each field's value, type, default, who set it and what it means.

Reads the comments of `sfjax.config`, where the meanings are written once. Free of jax.
"""

import ast
import enum
import inspect
import io
import json
import tokenize
import types
import typing
from collections.abc import Collection
from typing import Any

from sfjax.config import Config
from sfjax.fields import field_types, get_field, is_section

DEFAULT, FILE, FLAG, AUTOMATIC = 'default', 'file', 'flag', 'automatic'


def meanings(cls: type = Config, prefix: str = '') -> dict[str, str]:
  """The comment beside each field, or else above it, by the field's path."""
  source = inspect.getsource(cls)
  beside, above = _comments(source)
  hints = typing.get_type_hints(cls)
  (definition,) = ast.parse(source).body
  assert isinstance(definition, ast.ClassDef)
  found = {}
  for node in definition.body:
    if not isinstance(node, ast.AnnAssign):
      continue
    assert isinstance(node.target, ast.Name) and node.end_lineno is not None
    name = node.target.id
    if is_section(hints[name]):
      found |= meanings(hints[name], f'{prefix}{name}.')
      continue
    first = node.lineno
    while first - 1 in above:
      first -= 1
    lines = [beside[i] for i in range(node.lineno, node.end_lineno + 1) if i in beside]
    found[prefix + name] = ' '.join(lines or [above[i] for i in range(first, node.lineno)])
  return found


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
  """The comments beside code and those that have a line to themselves, by line."""
  beside, alone = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      code = token.line[: token.start[1]].strip()
      (beside if code else alone)[token.start[0]] = token.string.lstrip('# ')
  return beside, alone


def set_by(config: Config, flags: Collection[str]) -> dict[str, str]:
  """Who set each field of a configuration of the right types, not resolved yet, by path.

  Args:
    config: as it came from its file and the command line.
    flags: paths of the fields given on the command line.
  """
  default = Config()
  found = {}
  for path in field_types(Config):
    changed = get_field(config, path) != get_field(default, path)
    found[path] = FLAG if path in flags else FILE if changed else DEFAULT
  return found


def with_automatic(sources: dict[str, str], before: Config, after: Config) -> dict[str, str]:
  """The same for the configuration `after`, which `resolve` made of the one `before`."""
  return {
    path: source if get_field(before, path) == get_field(after, path) else AUTOMATIC
    for path, source in sources.items()
  }


def table(config: Config, sources: dict[str, str], notes: Collection[str]) -> str:
  """Formats every field of a configuration.

  Args:
    config: resolved.
    sources: who set each field.
    notes: what `resolve` said; a value that it chose gets its reason.
  """
  default, means = Config(), meanings()
  rows = [('field', 'value', 'type', 'default', 'set by', 'meaning')]
  for path, hint in field_types(Config).items():
    start = f'{path} = '
    reasons = [note.partition(': ')[2] for note in notes if note.startswith(start)]
    rows.append(
      (
        path,
        _text(get_field(config, path)),
        _type_name(hint),
        _text(get_field(default, path)),
        sources[path],
        ' '.join([means[path], *(f'(Here: {reason}.)' for reason in reasons)]),
      )
    )
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
  return '\n'.join(
    '  '.join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
    for row in rows
  )


def _text(value: Any) -> str:
  """A value as a flag takes it."""
  if isinstance(value, enum.Enum):
    return str(value.value)
  if isinstance(value, tuple):
    return ','.join(_text(item) for item in value)
  return json.dumps(value) if isinstance(value, dict) else str(value)


def _type_name(hint: Any) -> str:
  if isinstance(hint, types.UnionType):
    return ' or '.join(_type_name(arg) for arg in typing.get_args(hint))
  if typing.get_origin(hint) is tuple:
    return f'{_type_name(typing.get_args(hint)[0])}s'
  if typing.get_origin(hint) is dict:
    return 'JSON'
  if issubclass(hint, enum.Enum):
    return '|'.join(str(member.value) for member in hint)
  return 'None' if hint is type(None) else hint.__name__
