"""Typed configuration of a run, its automatic values, and the check that comes before a start.

Files in `configs/` build a `Config`; every field is also a flag (`--config.train.seed=1`). A field
that is None takes an automatic value, which `resolve` fills in and explains.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from sfjax.fields import field_types, get_field, wrong_types

DEFAULT_ENVS_PER_WORKER = 16
MIN_PIXELS = 36  # Height and width of the smallest image that the three convolutions can take.


class Encoder(enum.Enum):
  """How an observation becomes features."""

  CONV = 'conv'  # 32·8·4, 64·4·2, 128·3·2, then a fully connected layer.
  MLP = 'mlp'


class Core(enum.Enum):
  """What the policy remembers between steps."""

  NONE = 'none'
  GRU = 'gru'


@dataclass(slots=True, kw_only=True)
class EnvConfig:
  name: str = 'doom:basic'  # doom:<scenario>, or the id of a registered Gymnasium environment.
  frameskip: int = 1  # Simulator frames per action.
  reward_scale: float = 1.0  # Multiplies training rewards; statistics stay raw.
  kwargs: dict[str, Any] = field(default_factory=dict)  # Options of the environment.


@dataclass(slots=True, kw_only=True)
class SamplerConfig:
  num_workers: int | None = None  # Worker processes; None: by the usable CPUs.
  num_envs: int | None = None  # Environments in all, instead of envs_per_worker.
  envs_per_worker: int | None = None  # K, environments in each worker; None: 16, or by num_envs.
  num_splits: int = 2  # S: one split steps while another waits for its actions.
  rows_per_stream: int | None = None  # R: trajectories a stream may have in flight; None: 2.
  decorrelation_steps: int | None = None  # Random first actions, × index in worker; None: T.
  pin_workers: bool = True  # Keep a worker and its game engines on one CPU.


@dataclass(slots=True, kw_only=True)
class ModelConfig:
  encoder: Encoder = Encoder.CONV  # conv for images, mlp for vectors.
  encoder_size: int = 512  # Width of the fully connected layer after the convolutions.
  mlp_layers: tuple[int, ...] = (64, 64)  # Widths of the layers of encoder mlp.
  core: Core = Core.GRU  # What the policy remembers between steps: none, or a GRU.
  core_size: int = 512  # Width of the GRU's state.


@dataclass(slots=True, kw_only=True)
class LossConfig:
  gamma: float = 0.99  # Discount per sample.
  use_vtrace: bool = True  # V-trace corrects for old policies; False: GAE, which does not.
  rho_bar: float = 1.0  # V-trace: cap on ρ; decides which policy's values are learned.
  c_bar: float = 1.0  # V-trace: cap on the trace; trades speed of learning against variance.
  gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the returns.
  use_clip: bool = True  # False: the plain policy gradient of IMPALA and A2C.
  clip_ratio: float = 0.1  # The ratio is kept in [1 / (1 + c), 1 + c].
  value_coef: float = 0.5  # Weight of the critic's loss.
  value_clip: float = 0.2  # How far an update may move a value from the one acted with.
  entropy_coef: float = 0.003  # Weight of the entropy bonus, which keeps actions varied.
  normalize_advantages: bool = True  # To mean 0 and deviation 1 over each batch.


@dataclass(slots=True, kw_only=True)
class LearnerConfig:
  rollout: int = 32  # T: steps in a trajectory.
  batch_size: int = 1024  # Slots in a batch, B·T.
  epochs: int = 1  # SGD updates on a batch.
  learning_rate: float = 1e-4  # Adam's step size.
  adam_eps: float = 1e-6  # Adam's ε: keeps steps small where gradients are tiny.
  max_grad_norm: float = 4.0  # 0: no clipping.
  max_policy_lag: int = 100  # Samples older than this many updates are not trained on.
  microbatch: int | None = None  # Observations the encoder sees at once; None: by platform.
  num_threads: int | None = None  # XLA's CPU threads in the learner; None: by the usable CPUs.


@dataclass(slots=True, kw_only=True)
class InferenceConfig:
  num_threads: int = 1  # XLA's threads in the inference server.


@dataclass(slots=True, kw_only=True)
class TrainConfig:
  serial: bool = False  # All loops in one process, in turn: reproducible, for debugging.
  synchronous: bool = False  # Sample and learn in turn, lag 0; B is a multiple of the streams.
  seed: int = 0  # Decides parameters, actions and episodes.
  num_policies: int = 1  # P: policies trained side by side, each on its share of the streams.
  max_frames: int = 10_000_000  # Per policy, counted over all resumes.
  max_seconds: float | None = None  # Wall time of this start.
  stop_at_return: float | None = None  # Mean return of a full window of episodes.
  window: int = 100  # Episodes in the running means.
  report_every_s: float = 5.0  # Between status lines, which are also lines of metrics.jsonl.


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
  every_s: float = 120.0  # Between checkpoints; there is one more at the end.
  keep: int = 3  # Newest checkpoints kept.


@dataclass(slots=True, kw_only=True)
class Config:
  name: str = 'run'  # The run folder is runs/<name> unless --workdir says otherwise.
  env: EnvConfig = field(default_factory=EnvConfig)
  sampler: SamplerConfig = field(default_factory=SamplerConfig)
  model: ModelConfig = field(default_factory=ModelConfig)
  loss: LossConfig = field(default_factory=LossConfig)
  learner: LearnerConfig = field(default_factory=LearnerConfig)
  inference: InferenceConfig = field(default_factory=InferenceConfig)
  train: TrainConfig = field(default_factory=TrainConfig)
  checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def core_size(config: Config) -> int:
  """Width of the recurrent state of one stream; 0 without a core."""
  return config.model.core_size if config.model.core is Core.GRU else 0


def trajectories_per_batch(config: Config) -> int:
  """B."""
  return config.learner.batch_size // config.learner.rollout


def worker_envs(config: Config) -> tuple[int, ...]:
  """Environments of each worker, K, in a resolved configuration; they differ by at most one."""
  sampler = config.sampler
  workers = sampler.num_workers or 0
  if sampler.num_envs is None:
    return (sampler.envs_per_worker or 0,) * workers
  size, larger = divmod(sampler.num_envs, max(workers, 1))
  return tuple(size + (index < larger) for index in range(workers))


def streams(config: Config) -> int:
  """Streams of a run whose number of workers is known."""
  return sum(worker_envs(config))


def resolve(config: Config, *, cpus: int, cpus_reason: str, accelerator: bool) -> list[str]:
  """Fills in the automatic sizes that depend on the machine.

  One worker a CPU is the most that helps. Where the CPUs also learn, learning takes about as much
  of them as all the rest, and workers on every CPU would only interrupt it.

  Args:
    config: changed in place.
    cpus: CPUs this process may really use.
    cpus_reason: how that number was found.
    accelerator: whether the network runs on one.

  Returns:
    A line for each value chosen, with the reason.
  """
  chosen = []
  count = cpus if accelerator else max(1, cpus // 2)
  share = 'all' if accelerator else 'half'
  reason = f'{share} of the {cpus} usable CPUs ({cpus_reason})'
  if config.sampler.num_workers is None:
    config.sampler.num_workers = count
    chosen.append(f'sampler.num_workers = {count}: {reason}')
  chosen += _resolve_envs(config.sampler)
  if config.learner.num_threads is None:
    config.learner.num_threads = count
    chosen.append(f'learner.num_threads = {count}: {reason}')
  if config.sampler.rows_per_stream is None:
    config.sampler.rows_per_stream = 2
    if config.train.synchronous and config.learner.rollout > 0 and streams(config) > 0:
      # A batch is all rows of all streams, and no row is free again before its update.
      config.sampler.rows_per_stream = max(1, trajectories_per_batch(config) // streams(config))
  if config.sampler.decorrelation_steps is None:
    config.sampler.decorrelation_steps = config.learner.rollout
  return chosen


def _resolve_envs(sampler: SamplerConfig) -> list[str]:
  chosen = []
  envs, workers = sampler.num_envs, sampler.num_workers or 0
  if envs is None:
    if sampler.envs_per_worker is None:
      sampler.envs_per_worker = DEFAULT_ENVS_PER_WORKER
    return []
  if 0 < envs < workers:
    sampler.num_workers = workers = envs
    chosen.append(f'sampler.num_workers = {envs}: there are only {envs} environments')
  if min(envs, workers, sampler.num_splits) > 0 and envs % (workers * sampler.num_splits):
    chosen.append(
      f'warning: sampler.num_envs {envs} is not a multiple of {workers} workers × '
      f'{sampler.num_splits} splits: workers and splits differ by one environment'
    )
  return chosen


def check_types(config: Config) -> None:
  """Checks that every value can be computed with; `resolve` needs that.

  Raises:
    ValueError: every value of another type than its field's, and what it must be.
  """
  problems = wrong_types(config)
  if problems:
    raise ValueError('\n'.join(f'  {problem}' for problem in problems))


def validate(config: Config) -> None:
  """Checks a resolved configuration.

  Raises:
    ValueError: every problem at once, each with the value, the limit and the fix.
  """
  check_types(config)
  problems = [*_out_of_range(config), *_mismatches(config)]
  if problems:
    raise ValueError('\n'.join(f'  {problem}' for problem in problems))


def check_encoder(config: Config, obs_shape: tuple[int, ...]) -> None:
  """Checks that the encoder fits observations of this shape.

  Raises:
    ValueError: it does not; with the fix.
  """
  encoder = config.model.encoder
  fitting = Encoder.CONV if len(obs_shape) == 3 else Encoder.MLP
  if encoder is not fitting:
    raise ValueError(
      f'  model.encoder is {encoder.value} and {config.env.name} has observations of shape '
      f'{obs_shape}; use {fitting.value}'
    )
  if fitting is Encoder.CONV and min(obs_shape[:2]) < MIN_PIXELS:
    raise ValueError(
      f'  {config.env.name} has images of {obs_shape[0]} × {obs_shape[1]} pixels; the convolutions '
      f'of model.encoder conv need {MIN_PIXELS} × {MIN_PIXELS}'
    )


_POSITIVE = (
  'env.frameskip sampler.num_workers sampler.num_envs sampler.envs_per_worker '
  'sampler.num_splits sampler.rows_per_stream model.encoder_size model.core_size learner.rollout '
  'learner.batch_size learner.epochs learner.learning_rate learner.adam_eps '
  'learner.microbatch learner.num_threads inference.num_threads train.num_policies '
  'train.max_frames train.max_seconds train.window train.report_every_s checkpoint.every_s '
  'checkpoint.keep loss.rho_bar loss.c_bar loss.clip_ratio loss.value_clip'
).split()
_NOT_NEGATIVE = (
  'train.seed sampler.decorrelation_steps learner.max_grad_norm learner.max_policy_lag '
  'loss.value_coef loss.entropy_coef'
).split()
_FRACTIONS = ('loss.gamma', 'loss.gae_lambda')


def _out_of_range(config: Config) -> list[str]:
  problems = []
  for paths, limit, holds in (
    (_POSITIVE, 'above 0', lambda x: x > 0),
    (_NOT_NEGATIVE, '0 or more', lambda x: x >= 0),
    (_FRACTIONS, 'between 0 and 1', lambda x: 0 <= x <= 1),
  ):
    for path in paths:
      value = get_field(config, path)
      if value is not None and not holds(value):
        problems.append(f'{path} is {value}; it must be {limit}')
  without_limit = set(field_types(Config)) - {*_POSITIVE, *_NOT_NEGATIVE, *_FRACTIONS}
  for path in sorted(without_limit):
    value = get_field(config, path)
    if isinstance(value, float) and math.isnan(value):
      problems.append(f'{path} is {value}; it must be a number')
  layers = config.model.mlp_layers
  if any(size <= 0 for size in layers):
    problems.append(f'model.mlp_layers is {layers}; every size must be above 0')
  return problems


def _mismatches(config: Config) -> list[str]:
  problems = []
  rollout, batch = config.learner.rollout, config.learner.batch_size
  if rollout > 0 and batch % rollout:
    below = max(batch // rollout, 1) * rollout
    problems.append(
      f'learner.batch_size {batch} is not a multiple of learner.rollout {rollout}; '
      f'use {below} or {below + rollout}'
    )
  if config.train.num_policies > streams(config) > 0:
    problems.append(
      f'train.num_policies {config.train.num_policies} is more than the {streams(config)} '
      f'environments; every policy needs one'
    )
  if config.train.synchronous:
    problems += _synchronous_mismatches(config)
  if config.train.seed >= 2**31:
    problems.append(f'train.seed is {config.train.seed}; it must be below {2**31}')
  envs, splits = config.sampler.envs_per_worker, config.sampler.num_splits
  if config.sampler.num_envs is not None and envs is not None:
    problems.append(
      f'sampler.num_envs {config.sampler.num_envs} and sampler.envs_per_worker {envs} are both '
      f'given; give one of them'
    )
  elif envs is not None and splits > 0 and envs % splits:
    below = max(envs // splits, 1) * splits
    problems.append(
      f'sampler.envs_per_worker {envs} is not a multiple of sampler.num_splits {splits}; '
      f'use {below} or {below + splits}'
    )
  micro = config.learner.microbatch
  slots = (rollout + 1) * (batch // rollout) if rollout > 0 else 0
  if micro and micro > 0 and slots > 0 and slots % micro:
    near = [n for n in range(1, slots + 1) if slots % n == 0]
    below = max(n for n in near if n <= micro)
    problems.append(
      f'learner.microbatch {micro} does not divide the {slots} observations of a batch '
      f'((rollout + 1) · batch_size / rollout); use {below} or {min(n for n in near if n > below)}'
      if below < slots
      else f'learner.microbatch {micro} is more than the {slots} observations of a batch'
    )
  return problems


def _synchronous_mismatches(config: Config) -> list[str]:
  problems = []
  rollout, batch, count = config.learner.rollout, config.learner.batch_size, streams(config)
  if config.train.num_policies != 1:
    problems.append(
      f'train.synchronous trains 1 policy; train.num_policies is {config.train.num_policies}'
    )
  rows = config.sampler.rows_per_stream or 0
  if rollout > 0 and count > 0 and batch != rollout * count * rows:
    unit = rollout * count
    below = max(batch // unit, 1) * unit
    problems.append(
      f'train.synchronous needs learner.batch_size {batch} to be a multiple of rollout × '
      f'environments, {rollout} × {count}, with sampler.rows_per_stream trajectories of each '
      f'({rows}); use {below} or {below + unit}, and leave rows_per_stream unset'
    )
  return problems
