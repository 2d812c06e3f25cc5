"""What the machine grants, from folders that look like those of the kernel."""

import fcntl
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from sfjax import machine
from sfjax.machine import available_memory, check_platform, usable_cpus
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.queues import RecordQueue
from sfjax.specs import array_spec

GIB = 2**30
CPUS = tuple(range(8))


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
  """A kernel's folders: 64 GiB free, 8 CPUs, no limits."""
  monkeypatch.setattr(machine, 'ROOT', tmp_path)
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(CPUS), raising=False)
  write(tmp_path, 'proc/meminfo', f'MemTotal: 9 kB\nMemAvailable:   {64 * GIB // 1024} kB\n')
  return tmp_path


def write(root: Path, path: str, text: object) -> None:
  (root / path).parent.mkdir(parents=True, exist_ok=True)
  (root / path).write_text(f'{text}\n')


def limit_v2(root: Path, group: str, *, memory: object, used: object, cached: int = 0) -> None:
  write(root, f'sys/fs/cgroup/{group}/memory.max', memory)
  write(root, f'sys/fs/cgroup/{group}/memory.current', used)
  write(root, f'sys/fs/cgroup/{group}/memory.stat', f'anon 5\ninactive_file {cached}')


def limit_v1(root: Path, group: str, *, memory: object, used: object, cached: int = 0) -> None:
  write(root, f'sys/fs/cgroup/memory/{group}/memory.limit_in_bytes', memory)
  write(root, f'sys/fs/cgroup/memory/{group}/memory.usage_in_bytes', used)
  write(root, f'sys/fs/cgroup/memory/{group}/memory.stat', f'total_inactive_file {cached}')


def test_without_limits_all_is_granted(root):
  """Catches a limit read from 'max', from -1, or from version 1's number for none."""
  assert available_memory() == (64 * GIB, 'free memory')  # No cgroups at all.
  for cgroup in ('0::/', '0::/a/b', '4:memory:/a\n3:cpu,cpuacct:/a\n0::/a', '1:cpu:/a'):
    write(root, 'proc/self/cgroup', cgroup)
    write(root, 'sys/fs/cgroup/a/cpu.max', 'max 100000')
    limit_v2(root, 'a', memory='max', used=5)
    write(root, 'sys/fs/cgroup/cpu/a/cpu.cfs_quota_us', -1)
    write(root, 'sys/fs/cgroup/cpu/a/cpu.cfs_period_us', 100000)
    limit_v1(root, 'a', memory=9223372036854771712, used=5)
    assert available_memory() == (64 * GIB, 'free memory'), cgroup
    assert usable_cpus() == (CPUS, 8, 'affinity mask'), cgroup


@pytest.mark.parametrize('tightest', ('', 'outer', 'outer/inner'))
def test_the_tightest_of_all_groups_counts(root, tightest):
  """Catches a look at the innermost group alone, whose own file says 'max' or more."""
  write(root, 'proc/self/cgroup', '0::/outer/inner')
  for group in ('', 'outer', 'outer/inner'):
    limit_v2(root, group, memory=32 * GIB, used=GIB)
    write(root, f'sys/fs/cgroup/{group}/cpu.max', '700000 100000')
  limit_v2(root, tightest, memory=20 * GIB, used=12 * GIB)
  write(root, f'sys/fs/cgroup/{tightest}/cpu.max', '250000 100000')
  assert available_memory() == (8 * GIB, 'cgroup limit')
  # 2.5 CPUs' worth of time keep two workers busy.
  assert usable_cpus() == (CPUS, 2, 'cgroup quota, of 8 in the affinity mask')


@pytest.mark.parametrize('group', ('docker/x', ''))
def test_limits_of_version_1(root, group):
  """Catches version 1 left out, and a container that sees its own group at the top of the tree."""
  write(root, 'proc/self/cgroup', '7:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/')
  limit_v1(root, group, memory=4 * GIB, used=GIB)
  write(root, f'sys/fs/cgroup/cpu/{group}/cpu.cfs_quota_us', 50000)
  write(root, f'sys/fs/cgroup/cpu/{group}/cpu.cfs_period_us', 100000)
  assert available_memory() == (3 * GIB, 'cgroup limit')
  assert usable_cpus().count == 1


def test_what_the_kernel_gives_back_when_asked_is_available(root):
  """Catches a run that is refused because files were read before it: they count as used."""
  write(root, 'proc/self/cgroup', '0::/')
  limit_v2(root, '', memory=10 * GIB, used=9 * GIB, cached=5 * GIB)
  assert available_memory() == (6 * GIB, 'cgroup limit')
  limit_v2(root, '', memory=10 * GIB, used=11 * GIB)
  assert available_memory() == (0, 'cgroup limit')
  write(root, 'proc/self/cgroup', '2:memory:/')
  limit_v1(root, '', memory=10 * GIB, used=9 * GIB, cached=GIB)
  assert available_memory() == (2 * GIB, 'cgroup limit')


def test_a_system_without_proc_has_memory_and_cpus(tmp_path, monkeypatch):
  """Catches an error where there is no /proc/meminfo and no affinity, as on macOS."""
  monkeypatch.setattr(machine, 'ROOT', tmp_path)
  monkeypatch.delattr(os, 'sched_getaffinity', raising=False)
  memory, reason = available_memory()
  assert memory > GIB and reason == 'memory of the machine'
  assert usable_cpus().count == os.cpu_count()


def test_macos_runs_serially_and_windows_not_at_all(monkeypatch):
  """Catches a run that fails half-way, at the first call that the system does not have."""
  for serial in (False, True):
    check_platform(serial=serial)
  monkeypatch.setattr(sys, 'platform', 'darwin')
  check_platform(serial=True)
  with pytest.raises(ValueError, match='on darwin .* one process; add --config.train.serial'):
    check_platform(serial=False)
  monkeypatch.setattr(sys, 'platform', 'win32')
  for serial in (False, True):
    with pytest.raises(ValueError, match='does not run on Windows; use Linux, there WSL 2'):
      check_platform(serial=serial)


def test_what_a_serial_run_shares_needs_no_linux(tmp_path, monkeypatch):
  """Catches a call that macOS does not have, and a file left where a block has no memory file."""
  monkeypatch.setattr(sys, 'platform', 'darwin')
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  for name in ('memfd_create', 'posix_fallocate'):
    monkeypatch.delattr(os, name)
  monkeypatch.setattr(fcntl, 'fcntl', None)
  block = SharedBlock()
  specs = {'numbers': array_spec(np.int64, 1000)}
  block.allocate(specs)['numbers'][:] = np.arange(1000)
  assert block.map(specs)['numbers'].sum() == 499500
  queue = RecordQueue(np.dtype([('a', 'i4'), ('b', 'f8')]), capacity=10)
  assert queue.put(1, 2.0)
  assert queue.get_all().tolist() == [(1, 2.0)]
  assert list(tmp_path.iterdir()) == []
