"""Which code a run was made with: the commit, what was not committed, and nothing without git."""

import subprocess
import time
from pathlib import Path

import pytest

from sfjax import provenance as module
from sfjax.provenance import provenance

NOTHING = {'commit': None, 'diff': None, 'untracked': []}


def git(folder: Path, *command: str) -> str:
  result = subprocess.run(
    ['git', '-c', 'user.name=T', '-c', 'user.email=t@t', '-C', str(folder), *command],
    capture_output=True,
    text=True,
    check=True,
  )
  return result.stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
  """One commit, one changed file, one new file and one that git ignores."""
  package = tmp_path / 'repository' / 'package'
  package.mkdir(parents=True)
  (package / 'code.py').write_text('committed\n')
  (package.parent / '.gitignore').write_text('runs/\n')
  git(package.parent, 'init', '--quiet')
  git(package.parent, 'add', '.')
  git(package.parent, 'commit', '--quiet', '--message', 'first')
  (package / 'code.py').write_text('changed\n')
  (package.parent / 'new.py').write_text('new\n')
  (package.parent / 'runs').mkdir()
  (package.parent / 'runs' / 'result').write_text('ignored\n')
  return package


def test_commit_changes_and_new_files_are_recorded(repository):
  """Catches a run whose code cannot be told: no diff, only a part of the repository, no names."""
  found = module._code(repository)
  assert found['commit'] == git(repository, 'rev-parse', 'HEAD')
  assert '-committed\n+changed\n' in found['diff']
  assert found['untracked'] == ['new.py']
  git(repository, 'add', '.')  # What is staged is not committed either.
  assert '-committed\n+changed\n' in module._code(repository)['diff']


def test_a_folder_that_git_does_not_hold_is_no_repository(repository):
  """Catches the commit of another project, in whose environment the package was installed."""
  installed = repository.parent / 'runs' / 'site-packages'
  installed.mkdir()
  assert module._code(installed) == NOTHING
  assert module._code(installed, repository)['untracked'] == ['new.py']
  outside = repository.parent.parent
  assert module._code(outside) == NOTHING


def test_a_long_diff_is_cut_and_says_so(repository, monkeypatch):
  """Catches a run folder as large as what somebody left uncommitted."""
  monkeypatch.setattr(module, 'MAX_BYTES', 1000)
  (repository / 'code.py').write_text('long line\n' * 1000)
  diff = module._code(repository)['diff']
  assert diff.endswith('\n[cut after 1,000 bytes]\n')
  assert 1000 < len(diff) < 1100


def test_git_that_is_missing_failing_or_slow_ends_no_run(repository, tmp_path, monkeypatch):
  """Catches an exception, or a run that waits for ever, because of what is only a record."""
  monkeypatch.setattr(module, 'TIMEOUT_S', 0.2)
  programs = tmp_path / 'bin'
  programs.mkdir()
  monkeypatch.setenv('PATH', str(programs))
  assert module._code(repository) == NOTHING
  start = time.monotonic()
  for script in ('exit 1', 'exec /bin/sleep 9'):
    (programs / 'git').write_text(f'#!/bin/sh\n{script}\n')
    (programs / 'git').chmod(0o700)
    assert module._code(repository) == NOTHING
  assert time.monotonic() - start < 5
  record = provenance()
  assert record['commit'] is None
  assert {'sfjax', 'jax', 'numpy'} <= set(record['packages'])
