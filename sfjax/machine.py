"""What this machine lets us use: CPUs, memory, accelerators."""

import hashlib
import os
import platform
from pathlib import Path
from typing import NamedTuple


class UsableCpus(NamedTuple):
  """The CPUs this process may really use."""

  cpus: tuple[int, ...]  # Numbers a process can be pinned to.
  count: int  # Less than that many where a quota allows less.
  reason: str


def _cgroup_file(name: str) -> str | None:
  """Returns a limit of this process's cgroup (v2), looked up from the innermost group."""
  try:
    group = Path('/proc/self/cgroup').read_text().strip().rpartition('::')[2]
    folder = Path('/sys/fs/cgroup') / group.lstrip('/')
    for parent in (folder, *folder.parents):
      if (parent / name).is_file():
        return (parent / name).read_text().strip()
      if parent == Path('/sys/fs/cgroup'):
        break
  except OSError:
    return None
  return None


def usable_cpus() -> UsableCpus:
  """Finds the usable CPUs from the affinity mask and the cgroup quota."""
  if not hasattr(os, 'sched_getaffinity'):
    count = os.cpu_count() or 1
    return UsableCpus(tuple(range(count)), count, 'CPUs of the machine')
  cpus = tuple(sorted(os.sched_getaffinity(0)))
  quota = (_cgroup_file('cpu.max') or 'max').split()
  if quota[0] != 'max':
    allowed = max(1, int(int(quota[0]) / int(quota[1])))
    if allowed < len(cpus):
      return UsableCpus(cpus, allowed, f'cgroup quota, of {len(cpus)} in the affinity mask')
  return UsableCpus(cpus, len(cpus), 'affinity mask')


def available_memory() -> tuple[int, str]:
  """Returns the bytes of memory that can still be taken and what limits them."""
  info = dict(line.split(':') for line in Path('/proc/meminfo').read_text().splitlines())
  free, reason = int(info['MemAvailable'].split()[0]) * 1024, 'free memory'
  limit, used = _cgroup_file('memory.max'), _cgroup_file('memory.current')
  if limit and limit != 'max' and used and int(limit) - int(used) < free:
    return int(limit) - int(used), 'cgroup limit'
  return free, reason


def has_nvidia_device() -> bool:
  """Whether the kernel shows an NVIDIA device."""
  return Path('/dev/nvidia0').exists()


def compilation_cache() -> str:
  """Folder for compiled programs, one for each kind of CPU: they hold its instructions."""
  info = Path('/proc/cpuinfo').read_text() if Path('/proc/cpuinfo').is_file() else ''
  kind = next((line for line in info.splitlines() if line.startswith('flags')), platform.machine())
  base = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
  return str(base / 'sfjax' / f'jax-{hashlib.sha256(kind.encode()).hexdigest()[:12]}')
