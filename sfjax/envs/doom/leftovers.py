"""Keeps anything of a Doom engine from outliving the process that owns it.

An engine is a process of its own with three files in `/dev/shm`. When its owner is killed it sleeps
for ever (measured), and nobody unlinks the files. So engines start through a launcher that ties
their life to the owner's and leaves a marker with the engine's id; whoever notices the death, in
whatever process, removes the files that the markers name. Free of jax and of vizdoom.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

SHARED_MEMORY = Path('/dev/shm')
_KINDS = ('ViZDoomMQCtr', 'ViZDoomMQDoom', 'ViZDoomSM')
_MARKER = 'engine-'

# Both run as: <guard> <pid of the owner> <engine> <arguments>. The parent's id is checked *after*
# the signal is set: an owner that died in between would never be reported.
_CHECK = 'owner=$1; shift; [ "$PPID" = "$owner" ] && exec "$@"'
_PYTHON_GUARD = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
  os.execv(sys.argv[2], sys.argv[2:])
"""

# The marker is written before the engine starts, so a kill during its start leaves one too.
_LAUNCHER = """#!/bin/sh
previous=
for argument; do
  [ "$previous" = +viz_instance_id ] && : > {marker}"$argument"
  previous=$argument
done
exec {guard} {engine} "$@"
"""


def marker_path(scratch: str, instance_id: str) -> Path:
  """Returns the file whose presence says that this engine may have files in `/dev/shm`."""
  return Path(scratch) / f'{_MARKER}{instance_id}'


def write_launcher(scratch: str, engine: str) -> str:
  """Writes a program that runs `engine` as if called itself, but not beyond our own life.

  Args:
    scratch: folder for the program, and for the marker that it leaves.
    engine: path of the engine's executable.

  Returns:
    The path of the program.

  Raises:
    PermissionError: nothing can be executed from `scratch`.
  """
  path = Path(scratch) / 'engine.sh'
  marker = shlex.quote(str(marker_path(scratch, '')))
  text = _LAUNCHER.format(marker=marker, guard=shlex.join(_guard()), engine=shlex.quote(engine))
  path.write_text(text)
  path.chmod(0o700)
  if not os.access(path, os.X_OK):
    # ViZDoom would answer with a segmentation fault.
    raise PermissionError(f'{scratch} does not allow execution (mounted noexec?): set TMPDIR')
  return str(path)


def _guard() -> list[str]:
  if sys.platform != 'linux':
    return []  # There is no parent-death signal.
  setpriv = shutil.which('setpriv')
  if setpriv is None:
    return [sys.executable, '-I', '-S', '-c', _PYTHON_GUARD, str(os.getpid())]
  return [setpriv, '--pdeathsig', 'KILL', '/bin/sh', '-c', _CHECK, 'sh', str(os.getpid())]


def remove_engine_leftovers(scratch: str) -> int:
  """Unlinks the shared memory of every engine that has a marker in or below `scratch`.

  Call it when the engines' owners are dead: files of a living engine are not spared.

  Returns:
    How many files of `/dev/shm` it removed.
  """
  removed = 0
  for marker in list(Path(scratch).rglob(f'{_MARKER}*')):
    removed += remove_engine(str(marker.parent), marker.name.removeprefix(_MARKER))
  return removed


def remove_engine(scratch: str, instance_id: str) -> int:
  """Does so for one dead engine, whose marker is in `scratch`."""
  removed = sum(_unlink(SHARED_MEMORY / f'{kind}{instance_id}') for kind in _KINDS)
  _unlink(marker_path(scratch, instance_id))
  return removed


def _unlink(path: Path) -> bool:
  try:
    path.unlink()
  except FileNotFoundError:
    return False
  return True
