"""What this machine lets us use: the system, CPUs, memory, accelerators."""

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path('/')  # A test has a folder of its own.


class UsableCpus(NamedTuple):
  """The CPUs this process may really use."""

  cpus: tuple[int, ...]  # Numbers a process can be pinned to.
  count: int  # Less than that many where a quota allows less.
  reason: str


def check_platform(*, serial: bool) -> None:
  """Checks that this system can run it.

  Args:
    serial: all loops in one process.

  Raises:
    ValueError: it cannot; with the fix.
  """
  if sys.platform == 'win32':
    raise ValueError('  sfjax does not run on Windows; use Linux, there WSL 2')
  if sys.platform != 'linux' and not serial:
    raise ValueError(
      f'  on {sys.platform} all loops of a run must share one process; add --config.train.serial, '
      f'or use Linux'
    )


def _cgroups(root: Path, controller: str) -> list[Path]:
  """The folders of this process's cgroups that may limit `controller`, innermost first.

  All ancestors are among them: a limit holds for everything below it.
  """
  folders = []
  for line in _read(root / 'proc/self/cgroup').splitlines():
    _, controllers, group = line.split(':', 2)
    top = root / 'sys/fs/cgroup'
    if controllers:  # Version 1: a tree for each controller.
      if controller not in controllers.split(','):
        continue
      top /= controller
    elif (top / 'unified').is_dir():  # Version 2 beside version 1.
      top /= 'unified'
    folder = top / group.lstrip('/')
    folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]
  return folders


def _read(path: Path) -> str:
  """The text of a file, empty where there is none."""
  try:
    return path.read_text()
  except OSError:
    return ''


def _cpu_quota(root: Path) -> float | None:
  """The CPUs' worth of time that the tightest cgroup grants."""
  quotas = []
  for folder in _cgroups(root, 'cpu'):
    words = _read(folder / 'cpu.max').split()
    words = words or [_read(folder / f'cpu.cfs_{name}_us').strip() for name in ('quota', 'period')]
    if words[0].isdigit():  # Not 'max', nor -1 in version 1.
      quotas.append(int(words[0]) / int(words[1]))
  return min(quotas, default=None)


_MEMORY_FILES = (  # Limit, use, and the part of the use that the kernel gives back when asked.
  ('memory.max', 'memory.current', 'inactive_file'),
  ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
)


def _cgroup_memory(root: Path) -> int | None:
  """The bytes that the tightest cgroup still grants."""
  left = []
  for folder in _cgroups(root, 'memory'):
    for limit_file, used_file, cached in _MEMORY_FILES:
      limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
      if limit.isdigit() and used.isdigit():
        words = (line.split() for line in _read(folder / 'memory.stat').splitlines())
        stat = {name: int(value) for name, value in words}
        left.append(max(0, int(limit) - int(used) + stat.get(cached, 0)))
  return min(left, default=None)


def usable_cpus() -> UsableCpus:
  """Finds the usable CPUs from the affinity mask and the cgroup quotas."""
  if not hasattr(os, 'sched_getaffinity'):
    count = os.cpu_count() or 1
    return UsableCpus(tuple(range(count)), count, 'CPUs of the machine')
  cpus = tuple(sorted(os.sched_getaffinity(0)))
  quota = _cpu_quota(ROOT)
  if quota is not None and quota < len(cpus):
    return UsableCpus(
      cpus, max(1, int(quota)), f'cgroup quota, of {len(cpus)} in the affinity mask'
    )
  return UsableCpus(cpus, len(cpus), 'affinity mask')


def available_memory() -> tuple[int, str]:
  """Returns the bytes of memory that can still be taken and what limits them."""
  free, reason = _free_memory(ROOT)
  granted = _cgroup_memory(ROOT)
  return (free, reason) if granted is None or granted > free else (granted, 'cgroup limit')


def _free_memory(root: Path) -> tuple[int, str]:
  for line in _read(root / 'proc/meminfo').splitlines():
    if line.startswith('MemAvailable:'):
      return int(line.split()[1]) * 1024, 'free memory'
  # Other systems do not say without a package what is free.
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'), 'memory of the machine'


def has_nvidia_device() -> bool:
  """Whether the kernel shows an NVIDIA device."""
  return Path('/dev/nvidia0').exists()


def compilation_cache() -> str:
  """Folder for compiled programs, one for each kind of CPU: they hold its instructions."""
  lines = _read(Path('/proc/cpuinfo')).splitlines()
  kind = next((line for line in lines if line.startswith('flags')), platform.machine())
  base = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
  return str(base / 'sfjax' / f'jax-{hashlib.sha256(kind.encode()).hexdigest()[:12]}')
