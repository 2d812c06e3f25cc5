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

SECTIONS = ('3.1 ', '3.2 ', '3.3 ', '3.4 ', '3.5 ')
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
# Options of Sample Factory 2 by section; each section's first column has these and no others.
OPTIONS = {
  'Data regime': (
    'batch_size num_batches_per_epoch num_epochs rollout recurrence shuffle_minibatches gamma '
    'reward_scale reward_clip value_bootstrap normalize_returns obs_subtract_mean obs_scale '
    'normalize_input normalize_input_keys'
  ),
  'Losses': (
    'exploration_loss exploration_loss_coeff value_loss_coeff kl_loss_coeff gae_lambda '
    'ppo_clip_ratio ppo_clip_value with_vtrace vtrace_rho vtrace_c'
  ),
  'Optimizer and learning rate': (
    'optimizer adam_eps adam_beta1 adam_beta2 max_grad_norm learning_rate lr_schedule '
    'lr_schedule_kl_threshold lr_adaptive_min lr_adaptive_max'
  ),
  'Logging, termination, saving': (
    'log_to_file experiment_summaries_interval flush_summaries_interval stats_avg '
    'summaries_use_frameskip heartbeat_interval heartbeat_reporting_interval train_for_env_steps '
    'train_for_seconds save_every_sec keep_checkpoints load_checkpoint_kind save_milestones_sec '
    'save_best_every_sec save_best_metric save_best_after'
  ),
  'Model': (
    'encoder_mlp_layers encoder_conv_architecture encoder_conv_mlp_layers use_rnn rnn_size '
    'rnn_type rnn_num_layers decoder_mlp_layers nonlinearity policy_initialization '
    'policy_init_gain actor_critic_share_weights adaptive_stddev continuous_tanh_scale '
    'initial_stddev'
  ),
}
ABSENT = ('not yet', '-')  # Places of what is not here; such a row gives the reason.
CONFIG_FIELD = r'`(env|sampler|model|loss|learner|inference|train|checkpoint)\.(\w+)`'


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
    if where in ABSENT:
      assert why != '-', f'no reason in a row whose place is {where!r}'
    else:
      assert references(f'| {where} |'), f'no reference in {where!r}'


def section_rows(text: str, title: str) -> list[list[str]]:
  """Returns the table rows under the heading that starts with `title`."""
  parts = re.split(r'^###? ', text, flags=re.MULTILINE)
  return [row for part in parts if part.startswith(title) for row in table_rows(part)]


def test_sections_have_a_table(text):
  assert [section for section in SECTIONS if not section_rows(text, section)] == []


@pytest.mark.parametrize('title', OPTIONS)
def test_options_are_mapped(text, title):
  """Catches an option without a row, or with two."""
  rows = section_rows(text, title + '\n')
  named = [name for row in rows for name in re.findall(r'`(\w+)`', row[0])]
  assert sorted(named) == sorted(OPTIONS[title].split())


@pytest.mark.parametrize('document', ['README.md', 'docs/paper_map.md', 'docs/metrics.md'])
def test_config_fields_exist(document):
  """Catches a document that names a field after it was renamed."""
  found = set(re.findall(CONFIG_FIELD, (ROOT / document).read_text(encoding='utf-8')))
  paths = [f'sfjax/config.py:{part.capitalize()}Config.{name}' for part, name in sorted(found)]
  assert found and [p for p in map(problem, paths) if p] == []


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
