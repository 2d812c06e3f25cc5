"""The map from the paper to the code names only what exists. Reads the code, imports none of it."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / 'docs' / 'paper_map.md'
COLUMNS = ['their name', 'our word', 'where', 'differs because']
MIN_REFERENCES = 30

SECTIONS = ('3.1', '3.2', '3.3', '3.4', '3.5')
# Each must be in the first column of some row.
TERMS = (
  'rollout worker → policy worker: observations',
  'policy worker → rollout worker: actions',
  'rollout worker → learner: trajectories',
  'learner → policy workers: parameters',
  'double-buffered sampling',
  'preallocated shared tensors',
  'indices in queues',
  'policy parameter updates',
  'policy lag',
  'self-play',
  'population-based training',
  'inference worker',
  'action server',
  'batcher (SF2)',
  'learner (SF2)',
  'runner (SF2',
  'worker_num_splits',
  'alternating sampler',
  'policy_workers_per_policy',
  'num_envs_per_worker',
  '`rollout`',
  'recurrence',
  'num_batches_per_epoch',
  'policy_version',
  'version_diff',
  'valids',
  'trajectory buffers',
  'BatchSpec(T, B)',
  'collector',
  'TrajInfo',
  'sampler (rlpyt)',
  'algo (rlpyt)',
  'agent (rlpyt)',
  'leading dims',
)


def table_rows(text: str) -> list[list[str]]:
  """Returns the cells of every table row but the headers and their rulers."""
  lines = [line.strip() for line in text.splitlines()]
  rows = [line.strip('|').split('|') for line in lines if line.startswith('|')]
  rows = [[cell.strip() for cell in row] for row in rows]
  return [row for row in rows if row != COLUMNS and not set(''.join(row)) <= set('- :')]


def references(text: str) -> list[str]:
  """Returns what stands in backticks in the tables and names a Python file."""
  cells = [cell for row in table_rows(text) for cell in row]
  return [code for cell in cells for code in re.findall(r'`([^`]+)`', cell) if '.py' in code]


@functools.cache
def parse(path: Path) -> ast.Module:
  return ast.parse(path.read_text(encoding='utf-8'))


def members(node: ast.AST) -> dict[str, ast.AST]:
  """Returns what a module or class defines: classes, functions, fields, attributes of `self`."""
  if not isinstance(node, ast.Module | ast.ClassDef):
    return {}
  found: dict[str, ast.AST] = {}
  for item in node.body:
    if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      found[item.name] = item
    elif isinstance(item, ast.Assign | ast.AnnAssign):
      targets = item.targets if isinstance(item, ast.Assign) else [item.target]
      found |= {
        name.id: item for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)
      }
  if isinstance(node, ast.ClassDef):
    for item in ast.walk(node):
      if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
        if isinstance(item.value, ast.Name) and item.value.id == 'self':
          found.setdefault(item.attr, item)
  return found


def problem(reference: str) -> str | None:
  """Returns what is wrong with a reference, or None."""
  match = re.fullmatch(r'([\w/]+\.py):(\w+(?:\.\w+)*)', reference)
  if match is None:
    return f'{reference}: not of the form path:Name.attr'
  path = ROOT / match[1]
  if not path.is_file():
    return f'{reference}: no file {match[1]}'
  node: ast.AST = parse(path)
  for name in match[2].split('.'):
    known = members(node)
    if name not in known:
      return f'{reference}: no {name}'
    node = known[name]
  return None


@pytest.fixture(scope='module')
def text() -> str:
  return DOCUMENT.read_text(encoding='utf-8')


def test_references_exist(text):
  found = references(text)
  assert len(found) >= MIN_REFERENCES
  assert [p for p in map(problem, found) if p] == []


def test_rows_have_four_cells_and_a_place(text):
  rows = table_rows(text)
  assert [row for row in rows if len(row) != len(COLUMNS) or not all(row)] == []
  for _, _, where, why in rows:
    if where == 'not yet':
      assert why != '-', 'a row that is not there yet gives the reason'
    else:
      assert references(f'| {where} |'), f'no reference in {where!r}'


def test_sections_have_a_table(text):
  parts = re.split(r'^## ', text, flags=re.MULTILINE)
  for section in SECTIONS:
    assert any(p.startswith(section + ' ') and table_rows(p) for p in parts), section


def test_terms_are_mapped(text):
  names = '\n'.join(row[0] for row in table_rows(text)).lower()
  assert [term for term in TERMS if term.lower() not in names] == []


@pytest.mark.parametrize(
  'reference',
  [
    'sfjax/actors/worker.py:Worker.turns',
    'sfjax/actors/worker.py:Workers',
    'sfjax/actors/workers.py:Worker',
    'sfjax/actors/worker.py',
    'sfjax/config.py:SamplerConfig.envs',
    'sfjax/shm/slab.py:slab_specs.rows',
  ],
)
def test_wrong_reference_is_found(reference):
  assert problem(reference)


@pytest.mark.parametrize(
  'reference',
  [
    'sfjax/actors/worker.py:Worker.turn',
    'sfjax/config.py:SamplerConfig.num_splits',
    'sfjax/shm/slab.py:REQUEST',
    'sfjax/learner/learner.py:Learner.batcher',
  ],
)
def test_right_reference_resolves(reference):
  assert problem(reference) is None
