"""The table of metrics names what a run writes."""

import json
import re
from pathlib import Path

import numpy as np

from sfjax.metrics.records import UPDATE, UPDATE_METRICS
from sfjax.metrics.report import Report
from sfjax.metrics.stages import status_specs
from tests.fakes import make_transport, zeros

DOCUMENT = Path(__file__).parents[2] / 'docs' / 'metrics.md'
HEADER = ['name', 'unit', 'meaning']


def table_rows() -> list[list[str]]:
  lines = DOCUMENT.read_text(encoding='utf-8').splitlines()
  rows = [line.strip('|').split('|') for line in lines if line.startswith('|')]
  rows = [[cell.strip() for cell in row] for row in rows]
  return [row for row in rows if row != HEADER and not set(''.join(row)) <= set('- ')]


def test_every_metric_is_documented_once(tmp_path):
  """Catches a metric that nobody explains, and an explanation of none."""
  topology = make_transport().topology
  path = tmp_path / 'metrics.jsonl'
  status = zeros(status_specs(topology, 1))
  report = Report(status=status, topology=topology, window=1, path=path)
  report.add_updates(np.zeros(1, UPDATE))
  report.write()
  written = set(json.loads(path.read_text())) | set(UPDATE_METRICS)

  rows = table_rows()
  assert [row for row in rows if len(row) != len(HEADER) or not all(row)] == []
  documented = [name for row in rows for name in re.findall(r'`(\w+)`', row[0])]
  assert sorted(documented) == sorted(written)
