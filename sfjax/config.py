"""Typed configuration of a run, its automatic values, and the check that comes before a start.

Files in `configs/` build a `Config`; every field is also a flag (`--config.train.seed=1`). A field
that is None takes an automatic value, which `resolve` fills in and explains.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sfjax.fields import field_types, get_field, wrong_types
from sfjax.specs import ArraySpec

DEFAULT_ENVS_PER_WORKER = 16


class Encoder(enum.Enum):
  """How an image becomes features; numbers are features·kernel·stride of the convolutions."""

  CONV_SIMPLE = 'conv_simple'  # 32·8·4, 64·4·2, 128·3·2.
  CONV_ATARI = 'conv_atari'  # 32·8·4, 64·4·2, 64·3·1.
  CONV_IMPALA = 'conv_impala'  # 16·8·4, 32·4·2.
  RESNET = 'resnet'  # The deep network of IMPALA: 15 convolutions 3·1 of 16 and 32 features.
  MLP = 'mlp'  # Observations without an image.


# Height and width of the smallest image that the convolutions of an encoder can take.
MIN_PIXELS = {
  Encoder.CONV_SIMPLE: 36,
  Encoder.CONV_ATARI: 36,
  Encoder.CONV_IMPALA: 20,
  Encoder.RESNET: 1,
}


class Exploration(enum.Enum):
  """What keeps the policy from becoming certain too early."""

  ENTROPY = 'entropy'
  SYMMETRIC_KL = 'symmetric_kl'  # To uniform; of continuous parts of an action, their entropy.


class RatioRange(enum.Enum):
  """How far the clipped surrogate lets π/μ move, with c = loss.clip_ratio."""

  RATIO = 'ratio'  # [1 / (1 + c), 1 + c], as far down as up in log space.
  SYMMETRIC = 'symmetric'  # [1 - c, 1 + c], as in the PPO paper.


class Core(enum.Enum):
  """What the policy remembers between steps."""

  NONE = 'none'
  GRU = 'gru'
  LSTM = 'lstm'


class Activation(enum.Enum):
  """What follows every convolution and every dense layer of encoders and decoders."""

  ELU = 'elu'
  RELU = 'relu'
  TANH = 'tanh'


class Init(enum.Enum):
  """Initial distribution of all weights; biases start at 0."""

  ORTHOGONAL = 'orthogonal'
  XAVIER_UNIFORM = 'xavier_uniform'
  LECUN_NORMAL = 'lecun_normal'  # The default of Flax.


class Optimizer(enum.Enum):
  """What makes a step of a gradient."""

  ADAM = 'adam'
  ADAMW = 'adamw'
  LAMB = 'lamb'


class Schedule(enum.Enum):
  """How the learning rate changes with the frames, up to train.max_frames."""

  CONSTANT = 'constant'
  LINEAR = 'linear'
  COSINE = 'cosine'
  KL_ADAPTIVE = 'kl_adaptive'  # By the KL to the policy that acted, not by frames.


class ComputeDtype(enum.Enum):
  """Precision of products and activations."""

  FLOAT32 = 'float32'
  BFLOAT16 = 'bfloat16'


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
  encoder: Encoder = Encoder.CONV_SIMPLE  # Of images; mlp where an observation has none.
  conv_dense_layers: tuple[int, ...] = (512,)  # Widths of dense layers after the convolutions.
  mlp_layers: tuple[int, ...] = (128, 128)  # Of those over a vector, also beside an image.
  core: Core = Core.GRU  # What the policy remembers between steps.
  core_size: int = 512  # Width of a layer of the core.
  core_layers: int = 1  # Layers of the core on top of each other.
  decoder_layers: tuple[int, ...] = ()  # Widths of dense layers between core and heads.
  separate_critic: bool = False  # The critic has an encoder, core and decoder of its own.
  activation: Activation = Activation.ELU  # After every layer of encoders and decoders.
  init: Init = Init.ORTHOGONAL  # Initial weights of every layer.
  init_gain: float = 1.0  # Multiplies the initial weights of encoders and decoders.
  adaptive_stddev: bool = True  # Of continuous actions, by observation; False: learned by itself.
  squash_actions: bool = False  # Continuous actions by tanh onto their bounds; False: clipped.
  normalize_obs: tuple[str, ...] = ()  # Keys of observations brought to mean 0 and deviation 1.
  normalize_returns: bool = False  # The critic's output is in running deviations of the return.
  compute_dtype: ComputeDtype = ComputeDtype.FLOAT32  # Parameters and losses are float32.


@dataclass(slots=True, kw_only=True)
class LossConfig:
  gamma: float = 0.99  # Discount per sample.
  use_vtrace: bool = True  # V-trace corrects for old policies; False: GAE, which does not.
  rho_bar: float = 1.0  # V-trace: cap on ρ; decides which policy's values are learned.
  c_bar: float = 1.0  # V-trace: cap on the trace; trades speed of learning against variance.
  vtrace_lambda: float = 1.0  # V-trace: 0 trusts the critic, 1 the returns.
  gae_lambda: float = 0.95  # GAE: 0 trusts the critic, 1 the returns.
  use_clip: bool = True  # False: the plain policy gradient of IMPALA and A2C.
  clip_ratio: float = 0.1  # c, how far the ratio of a sample pays.
  ratio_range: RatioRange = RatioRange.RATIO  # [1 / (1 + c), 1 + c], or symmetric [1 - c, 1 + c].
  value_coef: float = 0.5  # Weight of the critic's loss.
  value_clip: float = 0.2  # How far an update may move a value from the one acted with.
  exploration: Exploration = Exploration.ENTROPY  # What keeps actions varied.
  exploration_coef: float = 0.003  # Weight of the exploration loss.
  kl_coef: float = 0.0  # Penalty on KL(policy that learns ‖ policy that acted).
  normalize_advantages: bool = True  # To mean 0 and deviation 1 over each minibatch.


@dataclass(slots=True, kw_only=True)
class LearnerConfig:
  rollout: int = 32  # T: steps in a trajectory.
  batch_size: int = 1024  # Slots in a batch, B·T.
  epochs: int = 1  # Times that a batch is gone through.
  minibatches: int = 1  # SGD updates in an epoch, each on its share of the trajectories.
  max_kl: float | None = None  # Mean KL to the policy that acted that ends a batch's epochs.
  bptt: int | None = None  # Steps that gradients flow back through the core; None: the rollout.
  learning_rate: float = 1e-4  # The optimizer's step size, at first.
  schedule: Schedule = Schedule.CONSTANT  # How it changes with the frames.
  final_learning_rate: float = 0.0  # Where linear and cosine end, at train.max_frames.
  kl_threshold: float = 0.008  # kl_adaptive: KL of an update that is aimed at, in nats.
  min_learning_rate: float = 1e-6  # kl_adaptive: the smallest rate.
  max_learning_rate: float = 1e-2  # kl_adaptive: the largest rate.
  optimizer: Optimizer = Optimizer.ADAM  # What makes a step of a gradient.
  adam_beta1: float = 0.9  # Decay of the mean of gradients, per update.
  adam_beta2: float = 0.999  # Decay of the mean of their squares, per update.
  adam_eps: float = 1e-6  # Keeps steps small where gradients are tiny.
  weight_decay: float = 0.0  # Of adamw and lamb, per update and learning rate.
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
  model = config.model
  arrays = {Core.NONE: 0, Core.GRU: 1, Core.LSTM: 2}[model.core]
  return arrays * model.core_size * model.core_layers * (2 if model.separate_critic else 1)


def trajectories_per_batch(config: Config) -> int:
  """B."""
  return config.learner.batch_size // config.learner.rollout


def updates_per_batch(config: Config) -> int:
  """SGD updates on a batch, unless its epochs are ended early."""
  return config.learner.epochs * config.learner.minibatches


def needs_behaviour_params(config: Config) -> bool:
  """Whether the distribution that acted is stored with every sample, for an exact KL."""
  learner = config.learner
  adaptive = learner.schedule is Schedule.KL_ADAPTIVE
  return config.loss.kl_coef > 0 or learner.max_kl is not None or adaptive


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


def check_encoder(config: Config, obs: Mapping[str, ArraySpec]) -> None:
  """Checks that encoder and normalisers fit observations of these shapes.

  Raises:
    ValueError: it does not; with the fix.
  """
  encoder = config.model.encoder
  shapes = {key: spec.shape for key, spec in obs.items()}
  images = {key: shape for key, shape in shapes.items() if len(shape) == 3}
  if (encoder is Encoder.MLP) == bool(images):
    fix = 'conv_simple, conv_atari, conv_impala or resnet' if images else 'mlp'
    raise ValueError(
      f'  model.encoder is {encoder.value} and {config.env.name} has observations of shape '
      f'{_shapes_text(shapes)}; use {fix}'
    )
  pixels = MIN_PIXELS.get(encoder, 0)
  small = {key: shape for key, shape in images.items() if min(shape[:2]) < pixels}
  if small:
    raise ValueError(
      f'  {config.env.name} has images of shape {_shapes_text(small)}; model.encoder '
      f'{encoder.value} needs {pixels} × {pixels} pixels; use larger ones, or resnet'
    )
  missing = [key for key in config.model.normalize_obs if key not in obs]
  if missing:
    raise ValueError(
      f'  model.normalize_obs has {missing}; the observations of {config.env.name} have the keys '
      f'{sorted(obs)}'
    )


def _shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
  return ', '.join(f'{shape} ({key})' for key, shape in shapes.items())


_POSITIVE = (
  'env.frameskip sampler.num_workers sampler.num_envs sampler.envs_per_worker '
  'sampler.num_splits sampler.rows_per_stream model.core_size model.core_layers model.init_gain '
  'learner.rollout learner.batch_size learner.epochs learner.minibatches learner.max_kl '
  'learner.bptt learner.learning_rate learner.adam_eps learner.kl_threshold '
  'learner.min_learning_rate learner.max_learning_rate '
  'learner.microbatch learner.num_threads inference.num_threads train.num_policies '
  'train.max_frames train.max_seconds train.window train.report_every_s checkpoint.every_s '
  'checkpoint.keep loss.rho_bar loss.c_bar loss.clip_ratio loss.value_clip'
).split()
_NOT_NEGATIVE = (
  'train.seed sampler.decorrelation_steps learner.max_grad_norm learner.max_policy_lag '
  'learner.final_learning_rate learner.weight_decay '
  'loss.value_coef loss.exploration_coef loss.kl_coef'
).split()
_FRACTIONS = ('loss.gamma', 'loss.gae_lambda', 'loss.vtrace_lambda')
_BELOW_1 = ('learner.adam_beta1', 'learner.adam_beta2')  # A mean that never decays never starts.


def _out_of_range(config: Config) -> list[str]:
  problems = []
  for paths, limit, holds in (
    (_POSITIVE, 'above 0', lambda x: x > 0),
    (_NOT_NEGATIVE, '0 or more', lambda x: x >= 0),
    (_FRACTIONS, 'between 0 and 1', lambda x: 0 <= x <= 1),
    (_BELOW_1, 'at least 0 and below 1', lambda x: 0 <= x < 1),
  ):
    for path in paths:
      value = get_field(config, path)
      if value is not None and not holds(value):
        problems.append(f'{path} is {value}; it must be {limit}')
  without_limit = set(field_types(Config)) - {*_POSITIVE, *_NOT_NEGATIVE, *_FRACTIONS, *_BELOW_1}
  for path in sorted(without_limit):
    value = get_field(config, path)
    if isinstance(value, float) and math.isnan(value):
      problems.append(f'{path} is {value}; it must be a number')
  for path in ('model.conv_dense_layers', 'model.mlp_layers', 'model.decoder_layers'):
    layers = get_field(config, path)
    if any(size <= 0 for size in layers):
      problems.append(f'{path} is {layers}; every size must be above 0')
  return problems


def _mismatches(config: Config) -> list[str]:
  problems = _learner_mismatches(config)
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
  return problems


def _learner_mismatches(config: Config) -> list[str]:
  problems = []
  learner, loss = config.learner, config.loss
  rates = (learner.min_learning_rate, learner.learning_rate, learner.max_learning_rate)
  if learner.schedule is Schedule.KL_ADAPTIVE and sorted(rates) != list(rates):
    problems.append(
      f'learner.learning_rate {rates[1]} is outside of min_learning_rate {rates[0]} to '
      f'max_learning_rate {rates[2]}, between which kl_adaptive moves it'
    )
  if config.learner.weight_decay and config.learner.optimizer is Optimizer.ADAM:
    problems.append(
      f'learner.weight_decay is {config.learner.weight_decay} and learner.optimizer adam does not '
      f'decay weights; use adamw'
    )
  rollout, batch, minibatches = learner.rollout, learner.batch_size, learner.minibatches
  if rollout > 0 and batch % rollout:
    below = max(batch // rollout, 1) * rollout
    problems.append(
      f'learner.batch_size {batch} is not a multiple of learner.rollout {rollout}; '
      f'use {below} or {below + rollout}'
    )
  trajectories = batch // rollout if rollout > 0 else 0
  if minibatches > 0 and trajectories > 0 and trajectories % minibatches:
    problems.append(
      f'learner.minibatches {minibatches} does not divide the {trajectories} trajectories of a '
      f'batch (batch_size / rollout); use {_divisors_near(minibatches, trajectories)}'
    )
  micro = learner.microbatch
  slots = (rollout + 1) * (trajectories // minibatches) if minibatches > 0 else 0
  if micro and micro > 0 and slots > 0 and slots % micro:
    problems.append(
      f'learner.microbatch {micro} does not divide the {slots} observations of a minibatch '
      f'((rollout + 1) · batch_size / rollout / minibatches); use {_divisors_near(micro, slots)}'
    )
  bptt = learner.bptt
  if bptt and bptt > 0 and rollout > 0 and rollout % bptt:
    problems.append(
      f'learner.bptt {bptt} does not divide learner.rollout {rollout}; '
      f'use {_divisors_near(bptt, rollout)}'
    )
  if bptt and config.model.core is Core.NONE:
    problems.append(
      f'learner.bptt is {bptt} and model.core none has nothing to flow back; unset it'
    )
  if learner.max_kl is not None and learner.epochs == 1:
    problems.append(
      f'learner.max_kl {learner.max_kl} ends the epochs of a batch and learner.epochs is 1; '
      f'unset it or use 2 epochs or more'
    )
  if loss.ratio_range is RatioRange.SYMMETRIC and loss.clip_ratio >= 1:
    problems.append(
      f'loss.clip_ratio is {loss.clip_ratio}; with loss.ratio_range symmetric it must be below 1'
    )
  return problems


def _divisors_near(value: int, total: int) -> str:
  """Names the divisors of `total` next to `value`, which is none."""
  divisors = [n for n in range(1, total + 1) if total % n == 0]
  near = [max(n for n in divisors if n < value), *(n for n in divisors if n > value)][:2]
  return ' or '.join(map(str, near))


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
