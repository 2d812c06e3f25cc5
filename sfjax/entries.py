"""What a child process does before anything else, and the loops it then enters.

Free of jax at import: unpickling the target of a spawned process imports this module first. The
entries of server and learner set thread counts before they import jax.
"""

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from sfjax.config import Config, core_size, needs_behaviour_params
from sfjax.machine import compilation_cache
from sfjax.metrics.stages import (
  Stage,
  StageTimer,
  learner_index,
  server_index,
  status_specs,
)
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.queues import RecordQueue
from sfjax.shm.slab import Topology, slab_specs, stream_specs
from sfjax.specs import ArraySpec, EnvSpec

RUN_ID = 'SFJAX_RUN_ID'  # Environment variable that marks every process of a run.

EXIT_UNGUARDED = 64  # Of a child whose script would train again; its parent says so.

_PR_SET_PDEATHSIG = 1
_WORKER_NICENESS = 5


def slab_layout(config: Config, topology: Topology, env: EnvSpec) -> dict[str, ArraySpec]:
  """Returns the specs of the slab of a run."""
  exact_kl = needs_behaviour_params(config)
  return slab_specs(topology, env, core_size(config), behaviour_params=exact_kl)


def streams_layout(config: Config, topology: Topology, env: EnvSpec) -> dict[str, ArraySpec]:
  """Returns the specs of the stream table and the mailboxes of a run."""
  exact_kl = needs_behaviour_params(config)
  return stream_specs(topology, env, core_size(config), behaviour_params=exact_kl)


@dataclass(slots=True, kw_only=True)
class Shared:
  """Everything the processes of a run have in common; travels in the spawn arguments."""

  config: Config
  topology: Topology
  env: EnvSpec
  cpus: tuple[int, ...]
  workdir: str
  scratch: str
  runtime_pid: int
  slab: SharedBlock
  streams: SharedBlock
  status: SharedBlock
  params: SharedBlock
  requests: RecordQueue
  trajectories: RecordQueue
  replies: list[RecordQueue]
  episodes: RecordQueue
  updates: RecordQueue

  def map_slab(self) -> dict[str, np.ndarray]:
    return self.slab.map(slab_layout(self.config, self.topology, self.env))

  def map_streams(self) -> dict[str, np.ndarray]:
    return self.streams.map(streams_layout(self.config, self.topology, self.env))

  def map_status(self) -> dict[str, np.ndarray]:
    return self.status.map(status_specs(self.topology, self.config.train.num_policies))


def _die_with(parent: int) -> None:
  """Asks the kernel to kill this process when the runtime's main thread ends."""
  if sys.platform == 'linux':
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # It died before the call.
    os._exit(1)


def enter_child(parent: int) -> None:
  """Ties a child to its parent and leaves the signals of the terminal to that."""
  _die_with(parent)
  os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the runtime alone, and not the engines.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def configure_xla(num_threads: int) -> None:
  """Sets what XLA reads from the environment; call it before jax is imported."""
  os.environ['NPROC'] = str(num_threads)  # XLA sizes its CPU thread pools by it.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # Two processes share a GPU.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  # Programs compiled by an earlier start are loaded. With jax's own limits nothing would be kept.
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', compilation_cache())
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')


def probe_main(parent: int, config: Config, scratch: str, reply: Connection) -> None:
  """Makes one environment and sends its `EnvSpec`, or the error that this raised."""
  enter_child(parent)
  from sfjax.envs.registry import EnvContext, make_env
  from sfjax.specs import env_spec

  try:
    env = make_env(
      config.env.name,
      EnvContext(
        seed=config.train.seed,
        frameskip=config.env.frameskip,
        options=config.env.kwargs,
        scratch=scratch,
      ),
    )
    spec = env_spec(env.observation_space, env.action_space, squash=config.model.squash_actions)
    reply.send(spec)
    env.close()
  except (ValueError, ImportError) as error:
    reply.send(error)


def worker_main(shared: Shared, index: int, generation: int) -> None:
  """Runs the environment worker `index`."""
  enter_child(shared.runtime_pid)
  config = shared.config
  status = shared.map_status()
  timer = StageTimer(status, index)
  # Inference and learner first: what they finish lets every environment go on.
  os.nice(_WORKER_NICENESS)
  if config.sampler.pin_workers:
    os.sched_setaffinity(0, {shared.cpus[index % len(shared.cpus)]})
  worker = make_worker(shared, index, generation, timer)
  print(
    f'worker {index}: {shared.topology.worker_envs[index]} environments, CPUs '
    f'{sorted(os.sched_getaffinity(0))}, threads {threading.active_count()}, generation '
    f'{generation}, seed {config.train.seed}, pid {os.getpid()}',
    flush=True,
  )
  try:
    worker.start()
    worker.run(stop_test(shared, status))
  finally:
    worker.close()


def make_worker(shared: Shared, index: int, generation: int, timer: StageTimer) -> Any:
  """Builds the environments, splits and loop of a worker."""
  from sfjax.actors.worker import Worker

  slab, streams = shared.map_slab(), shared.map_streams()
  splits = [
    _make_split(shared, index, generation, split, slab, streams)
    for split in shared.topology.splits_of(index)
  ]
  return Worker(generation=generation, splits=splits, replies=shared.replies[index], timer=timer)


def _make_split(
  shared: Shared,
  index: int,
  generation: int,
  split: int,
  slab: dict[str, np.ndarray],
  streams: dict[str, np.ndarray],
) -> Any:
  from sfjax.actors.splits import Split
  from sfjax.envs.registry import EnvContext, make_env
  from sfjax.specs import action_decoder

  config, topology = shared.config, shared.topology
  unit = config.sampler.decorrelation_steps
  assert unit is not None, 'resolve() fills it in'
  part = topology.streams_of(index, split)
  folder = Path(shared.scratch) / f'worker-{index}-{generation}'
  envs = []
  for stream in range(part.start, part.stop):
    scratch = folder / str(stream)
    scratch.mkdir(parents=True, exist_ok=True)
    context = EnvContext(
      worker=index,
      split=split,
      index=stream - topology.first_streams[index],
      env_id=stream,
      seed=config.train.seed,
      frameskip=config.env.frameskip,
      options=config.env.kwargs,
      scratch=str(scratch),
    )
    envs.append(make_env(config.env.name, context))

  def on_episode(
    stream: int, policy: int, truncated: bool, length: int, tics: int, episode_return: float
  ) -> None:
    # Telemetry is dropped when the runtime does not keep up; sampling never waits for it.
    shared.episodes.put(index, stream, policy, truncated, length, tics, episode_return)

  return Split(
    worker=index,
    generation=generation,
    index=split,
    envs=envs,
    spec=shared.env,
    topology=topology,
    slab=slab,
    streams=streams,
    requests=shared.requests,
    trajectories=shared.trajectories,
    on_episode=on_episode,
    num_policies=config.train.num_policies,
    seed=config.train.seed,
    reward_scale=config.env.reward_scale,
    decode=action_decoder(envs[0].action_space, shared.env.action),
    random_starts=[
      unit * (stream - topology.first_streams[index]) for stream in range(part.start, part.stop)
    ],
    partial=config.train.synchronous,
  )


def server_main(shared: Shared) -> None:
  """Runs the inference server."""
  enter_child(shared.runtime_pid)
  configure_xla(shared.config.inference.num_threads)
  status = shared.map_status()
  timer = StageTimer(status, server_index(shared.topology))
  from sfjax.inference.setup import make_policies

  should_stop = stop_test(shared, status)
  policies = make_policies(shared, timer, should_stop)
  if policies is not None:
    make_server(shared, status, policies, timer).run(should_stop)
  timer.enter(Stage.DONE)


def make_server(
  shared: Shared, status: dict[str, np.ndarray], policies: Any, timer: StageTimer
) -> Any:
  """Builds the inference server of a run around `policies`."""
  from sfjax.inference.server import Server

  return Server(
    policies=policies,
    num_policies=shared.config.train.num_policies,
    topology=shared.topology,
    slab=shared.map_slab(),
    streams=shared.map_streams(),
    requests=shared.requests,
    replies=shared.replies,
    timer=timer,
    acted=status['acted'],
    learner_versions=status['version'],
    seed=shared.config.train.seed,
  )


def learner_main(shared: Shared, trains: bool) -> None:
  """Runs the learner with its batcher; `trains` false publishes once and discards all rows."""
  enter_child(shared.runtime_pid)
  threads = shared.config.learner.num_threads
  assert threads is not None, 'resolve() fills it in'
  configure_xla(threads)
  status = shared.map_status()
  timer = StageTimer(status, learner_index(shared.topology))
  from sfjax.learner.setup import run_learner

  run_learner(shared, status, timer, stop_test(shared, status), trains=trains)
  timer.enter(Stage.DONE)


def guardian_main(runtime_pid: int, run_id: str, scratch: str, alive: Connection) -> None:
  """Waits for the end of the runtime; then kills what is left of the run and its leftovers.

  Children die with the runtime by the kernel's hand, but not what they started themselves.
  """
  os.setpgid(0, 0)
  for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
  try:
    alive.recv()
  except EOFError:
    time.sleep(0.2)  # Let the kernel deliver the children's death first.
  from sfjax.cleanup import kill_processes, remove_scratch

  kill_processes(run_id, spare=os.getpid())
  remove_scratch(scratch)


def stop_test(shared: Shared, status: dict[str, np.ndarray]) -> Callable[[], bool]:
  """Returns whether a loop should end: told so, or the runtime is gone."""
  return lambda: bool(status['stop'][0]) or os.getppid() != shared.runtime_pid


def make_scratch(run_id: str) -> str:
  """Makes the folder for what the processes of a run write while it lasts."""
  return tempfile.mkdtemp(prefix=f'sfjax-{run_id}-')
