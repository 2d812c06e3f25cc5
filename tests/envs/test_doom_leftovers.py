"""Doom engines and their files do not outlive the process that owns them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfjax.envs.doom import leftovers

ROOT = Path(__file__).parents[2]

OWNER = """
import shutil, sys, time
from sfjax.envs.registry import EnvContext, make_env
if sys.argv[2] == 'python':
  shutil.which = lambda name: None
env = make_env('doom:basic', EnvContext(frameskip=4, scratch=sys.argv[1]))
env.reset(seed=0)
env.step(0)
print(env._instance_id, flush=True)
time.sleep(60)
"""


def engines(instance_id):
  """Returns the pids of engines with this id, with their parents'."""
  found = []
  for folder in Path('/proc').glob('[0-9]*'):
    try:
      arguments = (folder / 'cmdline').read_bytes().split(b'\0')
      state = (folder / 'stat').read_text().rpartition(')')[2].split()
    except OSError:
      continue
    if arguments[0].endswith(b'/vizdoom') and instance_id.encode() in arguments and state[0] != 'Z':
      found.append((int(folder.name), int(state[1])))
  return found


def end(instance_id):
  """Ends what a failed test leaves behind."""
  for pid, _ in engines(instance_id):
    os.kill(pid, signal.SIGKILL)
  for path in Path('/dev/shm').glob(f'ViZDoom*{instance_id}'):
    path.unlink()


@pytest.mark.skipif(sys.platform != 'linux', reason='There is no parent-death signal.')
@pytest.mark.parametrize('guard', ['setpriv', 'python'])
def test_an_engine_dies_with_its_killed_owner_and_its_files_can_be_removed(
  tmp_path, request, guard
):
  """Catches an orphan that sleeps for ever, and files that nobody can name any more."""
  pytest.importorskip('vizdoom')
  scratch = tmp_path / 'worker-0' / '3'
  scratch.mkdir(parents=True)
  command = [sys.executable, '-c', OWNER, str(scratch), guard]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
    try:
      assert owner.stdout is not None
      instance_id = owner.stdout.readline().strip()
      assert instance_id, 'no engine started; and an empty id would match all there are'
      request.addfinalizer(lambda: end(instance_id))
      assert [parent for _, parent in engines(instance_id)] == [owner.pid]
    finally:
      owner.send_signal(signal.SIGKILL)
  deadline = time.monotonic() + 5
  while engines(instance_id) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not engines(instance_id)
  assert len(list(Path('/dev/shm').glob(f'ViZDoom*{instance_id}'))) == 3
  assert leftovers.remove_engine_leftovers(str(tmp_path)) == 3
  assert not list(Path('/dev/shm').glob(f'ViZDoom*{instance_id}'))
  assert leftovers.remove_engine_leftovers(str(tmp_path)) == 0


def test_only_files_with_a_marker_are_removed(tmp_path, monkeypatch):
  """Catches a pattern that takes the files of other runs along, above all for an empty id."""
  shared, scratch = tmp_path / 'shm', tmp_path / 'run'
  shared.mkdir()
  (scratch / 'a' / 'b').mkdir(parents=True)
  monkeypatch.setattr(leftovers, 'SHARED_MEMORY', shared)
  names = [f'ViZDoom{kind}{id_}' for id_ in ('mine', 'other') for kind in ('SM', 'MQCtr')]
  for name in names:
    (shared / name).touch()
  for marker in ('engine-mine', 'engine-gone', 'engine-'):
    (scratch / 'a' / 'b' / marker).touch()
  assert leftovers.remove_engine_leftovers(str(scratch)) == 2
  assert sorted(path.name for path in shared.iterdir()) == ['ViZDoomMQCtrother', 'ViZDoomSMother']
  assert leftovers.remove_engine_leftovers(str(tmp_path / 'missing')) == 0


def write_launcher_of_echo(folder):
  engine = folder / "it's an engine"
  engine.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
  engine.chmod(0o700)
  return leftovers.write_launcher(str(folder), str(engine))


@pytest.mark.parametrize('guard', ['setpriv', 'python'])
def test_the_launcher_hands_on_arguments_and_leaves_a_marker(tmp_path, monkeypatch, guard):
  """Catches lost quoting, and a marker written too late for a kill during the start."""
  if guard == 'python':
    monkeypatch.setattr(leftovers.shutil, 'which', lambda name: None)
  launcher = write_launcher_of_echo(tmp_path)
  command = [launcher, '-file', 'a b', '+viz_instance_id', 'xyz', '']
  result = subprocess.run(command, capture_output=True, text=True, check=True)
  assert result.stdout == '<-file><a b><+viz_instance_id><xyz><>'
  assert leftovers.marker_path(str(tmp_path), 'xyz').exists()


@pytest.mark.skipif(sys.platform != 'linux', reason='There is no parent-death signal.')
@pytest.mark.parametrize('guard', ['setpriv', 'python'])
def test_no_engine_starts_when_its_owner_is_already_gone(tmp_path, monkeypatch, guard):
  """Catches the gap between the start and the parent-death signal."""
  if guard == 'python':
    monkeypatch.setattr(leftovers.shutil, 'which', lambda name: None)
  launcher = write_launcher_of_echo(tmp_path)
  # The shell in between is the launcher's parent, so the owner, this process, is not.
  command = ['/bin/sh', '-c', '"$1" -x; true', 'sh', launcher]
  result = subprocess.run(command, capture_output=True, text=True, check=True)
  assert result.stdout == ''


def test_a_folder_that_forbids_execution_is_refused(tmp_path, monkeypatch):
  """Catches ViZDoom's segmentation fault on a `noexec` mount."""
  monkeypatch.setattr(leftovers.os, 'access', lambda path, mode: mode != os.X_OK)
  with pytest.raises(PermissionError, match='TMPDIR'):
    leftovers.write_launcher(str(tmp_path), '/bin/true')
