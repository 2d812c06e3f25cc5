"""Ends what a run may have left behind: processes that carry its id, engine files, scratch."""

import contextlib
import os
import shutil
import signal
from pathlib import Path


def processes_of(run_id: str, *, spare: int = 0) -> list[int]:
  """Returns the pids of processes with this run id in their environment, other than `spare`."""
  mark = f'SFJAX_RUN_ID={run_id}'.encode()
  found = []
  for folder in Path('/proc').glob('[0-9]*'):
    # A process may end while it is looked at, or belong to somebody else.
    with contextlib.suppress(OSError):
      if mark in (folder / 'environ').read_bytes().split(b'\0') and int(folder.name) != spare:
        found.append(int(folder.name))
  return found


def kill_processes(run_id: str, *, spare: int) -> None:
  """Kills every process of a run but `spare`."""
  for pid in processes_of(run_id, spare=spare):
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)


def remove_scratch(scratch: str) -> None:
  """Removes a run's scratch folder, and first the files of game engines that it names."""
  if Path(scratch).is_dir():
    from sfjax.envs.doom.leftovers import remove_engine_leftovers

    remove_engine_leftovers(scratch)
    shutil.rmtree(scratch, ignore_errors=True)
