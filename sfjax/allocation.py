"""What a run needs before its processes start: spaces, numbering, memory, a folder. Free of jax."""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sfjax import entries
from sfjax.config import Config, check_encoder, trajectories_per_batch, worker_envs
from sfjax.machine import available_memory, usable_cpus
from sfjax.metrics.records import EPISODE, UPDATE
from sfjax.metrics.stages import status_specs
from sfjax.shm.blocks import SharedBlock, block_bytes
from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import REPLY, REQUEST, TRAJECTORY, Topology
from sfjax.specs import EnvSpec

PROBE_TIMEOUT_S = 60.0


class ChildDiedError(RuntimeError):
  """A process without which the run cannot go on has ended or is stuck."""


class UnguardedScriptError(ValueError):
  """A script trains without the guard that keeps its children from doing the same."""


def plan(config: Config, scratch: str) -> tuple[EnvSpec, Topology]:
  """Learns the environment's spaces and checks that the run fits them and the memory.

  Raises:
    ValueError, ImportError: it does not; with the fix.
    ChildDiedError: see `probe_env`.
  """
  env = probe_env(config, scratch)
  check_encoder(config, env.obs)
  topology = make_topology(config)
  check_memory(config, topology, env)
  return env, topology


def probe_env(config: Config, scratch: str) -> EnvSpec:
  """Learns an environment's spaces in a process of its own, which it may crash.

  Raises:
    ValueError, ImportError: what making the environment raised.
    UnguardedScriptError: the process was the first to find out.
    ChildDiedError: the process ended without an answer.
  """
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(
    target=entries.probe_main, args=(os.getpid(), config, scratch, sender), name='probe'
  )
  process.start()
  sender.close()
  try:
    answer = receiver.recv() if receiver.poll(PROBE_TIMEOUT_S) else None
  except EOFError:
    answer = None
  if answer is None:
    process.kill()
  process.join()
  if isinstance(answer, Exception):
    raise answer
  if process.exitcode == entries.EXIT_UNGUARDED:
    raise UnguardedScriptError(
      f'{sys.argv[0]} would train in every process of the run, since each imports it again; put '
      f"what it does under `if __name__ == '__main__':`"
    )
  if answer is None:
    raise ChildDiedError(
      f'making the environment {config.env.name} ended its process with exit code '
      f'{process.exitcode}; its own output is above'
    )
  return answer


def make_topology(config: Config) -> Topology:
  """Numbers the workers, environments and rows of a resolved configuration."""
  sampler = config.sampler
  assert sampler.rows_per_stream is not None, 'resolve() fills it in'
  return Topology(
    worker_envs=worker_envs(config),
    num_splits=sampler.num_splits,
    rows_per_stream=sampler.rows_per_stream,
    rollout=config.learner.rollout,
  )


def check_memory(config: Config, topology: Topology, env: EnvSpec) -> None:
  """Checks that slab and training batches fit the memory.

  Raises:
    ValueError: they do not; the message has the need, the limit and the fix.
  """
  slab = block_bytes(entries.slab_layout(config, topology, env))
  batches = 2 * config.train.num_policies * trajectories_per_batch(config)
  batches *= slab // topology.num_rows
  available, reason = available_memory()
  if slab + batches > available:
    raise ValueError(
      f'  the slab needs {slab / 2**30:.2f} GiB and the training batches {batches / 2**30:.2f} '
      f'GiB, and {available / 2**30:.2f} GiB can be had ({reason}); make smaller: '
      f'sampler.num_envs or envs_per_worker ({topology.num_streams} environments in all), '
      f'sampler.rows_per_stream ({topology.rows_per_stream}), learner.rollout '
      f'({topology.rollout}) or learner.batch_size ({config.learner.batch_size})'
    )


def make_shared(
  config: Config, topology: Topology, env: EnvSpec, *, workdir: Path, scratch: str
) -> entries.Shared:
  """Allocates what the processes share."""
  streams, splits = topology.num_streams, topology.num_workers * topology.num_splits
  policies = config.train.num_policies
  blocks = [SharedBlock() for _ in range(4)]
  blocks[0].allocate(entries.slab_layout(config, topology, env))
  blocks[1].allocate(entries.streams_layout(config, topology, env))
  blocks[2].allocate(status_specs(topology, policies))
  # A restarted worker may ask and queue again what its predecessor did, hence twice.
  rows = max(topology.worker_envs) * topology.rows_per_stream
  replies = 2 * (topology.num_splits * policies + rows)
  return entries.Shared(
    config=config,
    topology=topology,
    env=env,
    cpus=usable_cpus().cpus,
    workdir=str(workdir),
    scratch=scratch,
    runtime_pid=os.getpid(),
    slab=blocks[0],
    streams=blocks[1],
    status=blocks[2],
    params=blocks[3],
    requests=RecordQueue(REQUEST, 2 * splits * policies + 256),
    trajectories=RecordQueue(TRAJECTORY, 2 * topology.num_rows),
    replies=[RecordQueue(REPLY, replies) for _ in range(topology.num_workers)],
    episodes=RecordQueue(EPISODE, max(4 * streams, 1024)),
    updates=RecordQueue(UPDATE, 256),
  )


@contextlib.contextmanager
def new_workdir(workdir: Path) -> Iterator[None]:
  """Makes the run folder, and takes away again what it made when the block raises.

  Raises:
    ValueError: the folder cannot be written.
  """
  missing: list[Path] = []
  try:
    try:
      missing += (folder for folder in (workdir, *workdir.parents) if not folder.exists())
      workdir.mkdir(parents=True, exist_ok=True)
      probe = workdir / '.writable'
      probe.touch()
      probe.unlink()
    except OSError as error:
      raise ValueError(
        f'  the run folder {workdir} cannot be written ({error.strerror}); choose another --workdir'
      ) from error
    yield
  except BaseException:
    for folder in missing:
      with contextlib.suppress(OSError):
        folder.rmdir()
    raise
