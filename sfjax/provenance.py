"""Which code a run was made with, for its run folder. Free of jax.

Nothing here may end a run: without git or a repository there is less to say.
"""

import importlib.metadata
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import sfjax

MAX_BYTES = 1_000_000  # Of the diff.
TIMEOUT_S = 5.0  # Of each call of git.

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'gymnasium', 'vizdoom')


def provenance() -> dict[str, Any]:
  """Describes code, command and packages as plain JSON values."""
  return {
    **_code(Path(__file__).parent, Path.cwd()),
    'argv': sys.argv,
    'python': platform.python_version(),
    'packages': {
      'sfjax': sfjax.__version__,
      **{name: version for name in _PACKAGES if (version := _version(name))},
    },
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _code(*folders: Path) -> dict[str, Any]:
  """Commit, uncommitted changes and untracked files of the first folder under version control."""
  for folder in folders:
    # An environment may lie inside of a repository that does not hold its packages.
    if not _git(folder, 'ls-files', '--error-unmatch', '.'):
      continue
    commit = _git(folder, 'rev-parse', 'HEAD')
    diff = _git(folder, 'diff', 'HEAD', '--no-ext-diff', '--no-textconv', '--no-color')
    untracked = _git(folder, 'ls-files', '--others', '--exclude-standard', '--full-name', ':/')
    return {
      'commit': commit.strip() if commit else None,
      'diff': diff,
      'untracked': untracked.splitlines() if untracked else [],
    }
  return {'commit': None, 'diff': None, 'untracked': []}


def _git(folder: Path, *command: str) -> str | None:
  """What git prints, cut where it is too long; None where it fails or takes too long."""
  try:
    process = subprocess.Popen(
      ['git', '--no-optional-locks', '-C', str(folder), *command],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
    )
  except OSError:
    return None
  assert process.stdout is not None
  timer = threading.Timer(TIMEOUT_S, process.kill)
  timer.start()
  with process:
    output = process.stdout.read(MAX_BYTES + 1)
    cut = len(output) > MAX_BYTES
    if cut:
      process.kill()
  timer.cancel()
  text = output[:MAX_BYTES].decode(errors='replace')
  if cut:
    return f'{text}\n[cut after {MAX_BYTES:,} bytes]\n'
  return text if process.returncode == 0 else None
