"""Measures the stages of a run one on top of the other, in one table.

Pure simulation; transport alone; step and inference; end to end: each is the median of three
windows, and a share of what pure simulation does on the same machine in the same minute.
"""

import copy
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sfjax import entries
from sfjax.allocation import ChildDiedError, make_topology, plan
from sfjax.config import Config, Core, core_size, streams, worker_envs
from sfjax.inference.server import Answer, Arrays, batch_specs
from sfjax.machine import check_platform
from sfjax.metrics.stages import Stage, StageTimer, server_index
from sfjax.runtime import Runtime
from sfjax.shm.blocks import SharedBlock
from sfjax.specs import action_decoder, action_spec, array_spec, random_action
from sfjax.training import EXIT_FAILED, bad_configuration, prepare

WINDOWS = 3
WINDOW_S = 10.0
WARM_UP_S = 5.0
START_TIMEOUT_S = 180.0
SLEEP_S = 0.002


class Row(NamedTuple):
  """One line of the table."""

  name: str
  samples_per_s: float  # The median window.
  windows: list[float]


class CheckingPolicies:
  """Acts without a network, and checks that every observation is the one that was written.

  An observation of `null:pixels` says whose it is and how many there were before it.
  """

  def __init__(self, buffer: Arrays) -> None:
    self._buffer = buffer

  def refresh(self, policy: int) -> None:
    """There are no parameters."""

  def buffer(self) -> Arrays:
    """Returns the one buffer: nothing reads it after `act`."""
    return self._buffer

  def act(self, policy: int, buffer: Arrays, n: int, bucket: int) -> Answer:
    """Checks the first, middle and last word of each observation; takes action 0.

    Raises:
      RuntimeError: an observation is not the one that belongs to this stream and step.
    """
    del policy, bucket
    words = buffer['obs/obs'][:n].reshape(n, -1).view(np.uint64)
    _, _, streams, _, steps = buffer['identity'][:n].astype(np.uint64).T
    expected = (streams << np.uint64(40)) | steps
    seen = words[:, [0, words.shape[1] // 2, -1]]
    if (seen != expected[:, None]).any():
      wrong = np.flatnonzero((seen != expected[:, None]).any(axis=1))[0]
      raise RuntimeError(
        f'stream {streams[wrong]} step {steps[wrong]}: observation holds {seen[wrong]}, '
        f'not {expected[wrong]}'
      )
    zeros = np.zeros(n, np.float32)
    action = np.zeros((n, 1), np.int32)  # `null:pixels` has one choice, and of it no parameters.
    return Answer(action, zeros, zeros, buffer['core'][:n], zeros[:, None], 0)


class SleepingPolicies(CheckingPolicies):
  """Takes the time of 0.4 · K environment steps for a batch."""

  def __init__(self, buffer: Arrays, sleep_s: float) -> None:
    super().__init__(buffer)
    self._sleep_s = sleep_s

  def act(self, policy: int, buffer: Arrays, n: int, bucket: int) -> Answer:
    """Sleeps, then acts."""
    time.sleep(self._sleep_s)
    return super().act(policy, buffer, n, bucket)


def checking_server_main(shared: entries.Shared) -> None:
  """Runs an inference server without a network; the target of a spawned process."""
  entries.enter_child(shared.runtime_pid)
  status = shared.map_status()
  timer = StageTimer(status, server_index(shared.topology))
  specs = batch_specs(shared.topology, shared.env, core_size(shared.config))
  buffer = {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
  sleep_s = shared.config.env.kwargs.get('sleep_s', 0.0) * 0.4 * max(shared.topology.worker_envs)
  policies = SleepingPolicies(buffer, sleep_s) if sleep_s else CheckingPolicies(buffer)
  entries.make_server(shared, status, policies, timer).run(entries.stop_test(shared, status))
  timer.enter(Stage.DONE)


def simulation_main(
  parent: int, config: Config, index: int, cpu: int | None, scratch: str, block: SharedBlock
) -> None:
  """Steps the environments of one worker with random actions until told to stop."""
  from sfjax.actors.splits import episode_seed
  from sfjax.envs.registry import EnvContext, make_env

  entries.enter_child(parent)
  if cpu is not None:
    os.sched_setaffinity(0, {cpu})
  counters = block.map(_SIMULATION_SPECS)
  rng = np.random.default_rng((config.train.seed, index))
  envs = []
  topology = make_topology(config)
  for i in range(topology.worker_envs[index % topology.num_workers]):
    folder = tempfile.mkdtemp(dir=scratch)
    context = EnvContext(
      worker=index,
      index=i,
      env_id=topology.num_streams * index + i,
      seed=config.train.seed,
      frameskip=config.env.frameskip,
      options=config.env.kwargs,
      scratch=folder,
    )
    envs.append(make_env(config.env.name, context))
  episodes = [0] * len(envs)
  for i, env in enumerate(envs):
    env.reset(seed=episode_seed(config.train.seed, i, 0))
  spec = action_spec(envs[0].action_space)
  decode = action_decoder(envs[0].action_space, spec)
  # Drawn ahead: drawing is no part of a simulation.
  drawn = [decode(np.stack([random_action(spec, rng) for _ in envs])) for _ in range(256)]
  turn = 0
  while not counters['stop'][0]:
    actions, turn = drawn[turn % len(drawn)], turn + 1
    for i, env in enumerate(envs):
      _, _, terminated, truncated, _ = env.step(actions[i])
      if terminated or truncated:
        episodes[i] += 1
        env.reset(seed=episode_seed(config.train.seed, i, episodes[i]))
    counters['samples'][index] += len(envs)
  for env in envs:
    env.close()


_MAX_SIMULATIONS = 1024
_SIMULATION_SPECS = {
  'stop': array_spec(np.int64, 1),
  'samples': array_spec(np.int64, _MAX_SIMULATIONS),
}


def measure(count: Callable[[], int], pause: Callable[[float], None]) -> list[float]:
  """Returns the rate of a counter per second in each window, after a warm-up."""
  pause(WARM_UP_S)
  rates = []
  for _ in range(WINDOWS):
    before, start = count(), time.monotonic()
    pause(WINDOW_S)
    rates.append((count() - before) / (time.monotonic() - start))
  return rates


def measure_simulation(config: Config, cpus: tuple[int, ...]) -> list[float]:
  """Samples per second of the environments alone, one pinned process on every usable CPU."""
  context = multiprocessing.get_context('spawn')
  block = SharedBlock()
  counters = block.allocate(_SIMULATION_SPECS)
  workers = len(cpus)
  with tempfile.TemporaryDirectory(prefix='sfjax-bench-') as scratch:
    processes = []
    for i in range(workers):
      cpu = cpus[i] if config.sampler.pin_workers else None
      args = (os.getpid(), config, i, cpu, scratch, block)
      processes.append(context.Process(target=simulation_main, args=args))
      processes[-1].start()
    try:
      deadline = time.monotonic() + START_TIMEOUT_S
      while not counters['samples'][:workers].all() and time.monotonic() < deadline:
        time.sleep(0.05)
      return measure(lambda: int(counters['samples'].sum()), time.sleep)
    finally:
      counters['stop'][0] = 1
      for process in processes:
        process.join(10)
        if process.exitcode is None:
          process.kill()


def measure_run(
  config: Config, *, counter: str, trains: bool, server_main: Any = entries.server_main
) -> list[float]:
  """Samples per second by a counter of the status block, in a run of its own.

  Raises:
    ChildDiedError: the run did not start or did not live.
  """
  with tempfile.TemporaryDirectory(prefix='sfjax-bench-') as workdir:
    runtime = Runtime(config, Path(workdir), trains=trains, server_main=server_main)
    status = runtime.status

    def pause(seconds: float) -> None:
      end = time.monotonic() + seconds
      while time.monotonic() < end:
        runtime.poll()

    try:
      runtime.start()
      deadline = time.monotonic() + START_TIMEOUT_S
      while not (status['learner_ready'][0] and status[counter].any()):
        pause(0.1)
        if time.monotonic() > deadline:
          raise ChildDiedError(f'nothing was counted within {START_TIMEOUT_S:.0f} s')
      return measure(lambda: int(status[counter].sum()), pause)
    finally:
      runtime.stop()


def transport_config(config: Config) -> Config:
  """The same layout with an environment that costs nothing and a policy without memory."""
  config = copy.deepcopy(config)
  config.env.name, config.env.kwargs = 'null:pixels', {}
  config.model.core = Core.NONE
  config.sampler.num_envs = None
  config.sampler.envs_per_worker = max(*worker_envs(config), 32)
  config.sampler.decorrelation_steps = 0  # The check counts from the first observation.
  return config


def sleeping_config(config: Config, *, splits: int) -> Config:
  """Environments and a policy that sleep, in one worker of one or two splits."""
  config = transport_config(config)
  config.env.kwargs = {'sleep_s': SLEEP_S}
  config.sampler.num_workers, config.sampler.envs_per_worker = 1, 16
  config.sampler.num_splits = splits
  return config


def bench(config: Config) -> int:
  """Measures a configuration, prints the table and returns the exit code."""
  try:
    check_platform(serial=False)
    prepare(config)
    with tempfile.TemporaryDirectory(prefix='sfjax-bench-') as scratch:
      plan(config, scratch)
  except (ValueError, ImportError) as error:
    return bad_configuration(error)
  except ChildDiedError as error:
    print(f'The benchmark could not start: {error}', file=sys.stderr, flush=True)
    return EXIT_FAILED
  cpus = tuple(sorted(os.sched_getaffinity(0)))
  rows, split_rates = [], []
  parts: list[tuple[str, Callable[[], list[float]]]] = [
    ('pure simulation', lambda: measure_simulation(config, cpus)),
    (
      'transport alone',
      lambda: measure_run(
        transport_config(config), counter='acted', trains=False, server_main=checking_server_main
      ),
    ),
    ('step + inference', lambda: measure_run(config, counter='acted', trains=False)),
    ('end to end', lambda: measure_run(config, counter='samples', trains=True)),
  ]
  try:
    for name, run in parts:
      windows = run()
      rows.append(Row(name, statistics.median(windows), windows))
    for splits in (1, 2):
      sleeping = sleeping_config(config, splits=splits)
      windows = measure_run(
        sleeping, counter='acted', trains=False, server_main=checking_server_main
      )
      split_rates.append(statistics.median(windows))
  except (ChildDiedError, ValueError, ImportError, OSError) as error:
    print(f'The benchmark failed: {error}', file=sys.stderr, flush=True)
    return EXIT_FAILED
  print(table(rows, config))
  one, two = split_rates
  print(
    f'double buffering: {two / one:.2f} times the rate of one split ({two:,.0f} against {one:,.0f} '
    f'samples/s) where a batch of actions takes as long as 0.4 of a step of all environments'
  )
  return 0


def table(rows: list[Row], config: Config) -> str:
  """Formats the measurements."""
  ceiling = rows[0].samples_per_s
  lines = [
    f'{config.env.name}, frameskip {config.env.frameskip}, {streams(config)} environments in '
    f'{config.sampler.num_workers} workers; median of {WINDOWS} windows of {WINDOW_S:.0f} s',
    f'{"stage":<18}{"samples/s":>12}{"frames/s":>12}{"of simulation":>15}   windows (samples/s)',
  ]
  for row in rows:
    windows = ' '.join(f'{rate:,.0f}' for rate in row.windows)
    frames = row.samples_per_s * config.env.frameskip
    # Transport has an environment of its own, so neither frames nor a ceiling.
    own = row.name == 'transport alone'
    lines.append(
      f'{row.name:<18}{row.samples_per_s:>12,.0f}{"-" if own else f"{frames:,.0f}":>12}'
      f'{"-" if own else f"{row.samples_per_s / ceiling:.1%}":>15}   {windows}'
    )
  return '\n'.join(lines)
