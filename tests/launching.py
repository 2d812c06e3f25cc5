"""Runs `launch.py` as a user does, and looks at what it leaves behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent


def command(*flags: str) -> list[str]:
  return [sys.executable, str(ROOT / 'launch.py'), *flags]


def environment() -> dict[str, str]:
  """The environment of a user: not the devices that the tests force on this process."""
  hidden = ('XLA_FLAGS', 'JAX_PLATFORMS', 'JAX_NUMPY_RANK_PROMOTION')
  return {key: value for key, value in os.environ.items() if key not in hidden}


def launch(*flags: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
  """Runs to the end and returns exit code and output (stdout and stderr together)."""
  return subprocess.run(
    command(*flags),
    cwd=cwd,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=timeout_s,
    check=False,
  )


class Run:
  """A run in the background, its output in a file."""

  def __init__(self, *flags: str, cwd: Path) -> None:
    self.log = cwd / 'output.txt'
    with self.log.open('w') as file:
      self.process = subprocess.Popen(
        command(*flags), cwd=cwd, env=environment(), stdout=file, stderr=subprocess.STDOUT
      )

  @property
  def output(self) -> str:
    return self.log.read_text()

  def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
    """Waits until the output contains `text`."""
    deadline = time.monotonic() + timeout_s
    while text not in self.output:
      assert self.process.poll() is None, f'ended before it said {text!r}:\n{self.output}'
      assert time.monotonic() < deadline, f'no {text!r} in {timeout_s} s:\n{self.output}'
      time.sleep(0.1)

  def tree(self) -> list[psutil.Process]:
    """Every process below the run."""
    return psutil.Process(self.process.pid).children(recursive=True)


def named(processes: list[psutil.Process], word: str) -> list[psutil.Process]:
  """The processes whose command line holds `word`."""
  found = []
  for process in processes:
    try:
      if any(word in part for part in process.cmdline()):
        found.append(process)
    except psutil.NoSuchProcess:
      continue
  return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
  """Those that still run, after a short grace."""
  _, left = psutil.wait_procs(processes, timeout=10)
  return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def shared_memory() -> set[str]:
  """What a game engine could have left in /dev/shm."""
  return {name for name in os.listdir('/dev/shm') if name.startswith('ViZDoom')}


def scratch_folders() -> set[str]:
  """Scratch folders of runs."""
  return {path.name for path in Path('/tmp').glob('sfjax-*')}


def metrics(workdir: Path) -> list[dict[str, Any]]:
  """The lines of a run's metrics.jsonl."""
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
