"""Shapes and dtypes of what an environment exchanges with us, from its Gymnasium spaces.

Observations become arrays by key, actions one row of numbers each; here is also the way back, from
stored rows to members of the action space. Free of jax, for the environment workers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
  import gymnasium

MASK = 'action_mask'  # Key of a dictionary observation that says which choices are allowed.

SUPPORTED_SPACES = (
  'observations: Box of uint8 [height, width, channels] or Box of numbers [n], or a Dict of these '
  f"with an optional flat '{MASK}'; actions: Discrete, MultiDiscrete, MultiBinary, Box of floats, "
  'or a Tuple or Dict of these'
)


class ArraySpec(NamedTuple):
  """Shape and dtype of one array."""

  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


def array_spec(dtype: str | type | np.dtype, *shape: int) -> ArraySpec:
  """Returns the spec of an array of `dtype` with dimensions `shape`."""
  return ArraySpec(tuple(shape), np.dtype(dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class ActionSpec:
  """An action space: K discrete choices times a box of D dimensions; either may be absent.

  A stored action is one row of K + D numbers: the choices, counted from 0, then the box. All
  parts are independent, so this covers every product of spaces; nesting and order matter to the
  environment alone (see `action_decoder`). A row of zeros is a member of every space, unmasked.

  The distribution's parameters are the logits of the choices one after the other, then D means,
  then D logarithms of deviations. A mask has one boolean for every logit.

  With `squash` a box column holds the number *before* tanh. The environment receives
  (low + high) / 2 + tanh(x) (high - low) / 2, and the log-probability needs no inverse of tanh.
  Without it the column is what the policy drew, and the environment receives it clipped.
  """

  choices: tuple[int, ...] = ()  # How many alternatives each discrete choice has.
  low: tuple[float, ...] = ()  # Bounds of each dimension of the box; may be infinite.
  high: tuple[float, ...] = ()
  squash: bool = False

  def __post_init__(self) -> None:
    problems = []
    if not self.size:
      problems.append('an action without any part')
    if min(self.choices, default=1) < 1:
      problems.append(f'choices {self.choices}: each needs an alternative or more')
    if len(self.low) != len(self.high):
      problems.append(f'{len(self.low)} lower bounds for {len(self.high)} upper bounds')
    for i, (low, high) in enumerate(zip(self.low, self.high, strict=False)):
      if not low <= high:
        problems.append(f'dimension {i}: low {low} is above high {high}')
      elif self.squash and not (math.isfinite(low) and math.isfinite(high) and low < high):
        problems.append(
          f'dimension {i}: [{low}, {high}] cannot be squashed onto; give it finite bounds of some '
          'width, or turn squashing off'
        )
    if problems:
      raise ValueError('; '.join(problems))

  @property
  def num_choices(self) -> int:
    """K, the discrete columns of a stored action."""
    return len(self.choices)

  @property
  def num_dims(self) -> int:
    """D, the columns of the box."""
    return len(self.low)

  @property
  def size(self) -> int:
    """Columns of a stored action."""
    return self.num_choices + self.num_dims

  @property
  def num_logits(self) -> int:
    """Logits of all choices together; also the size of a mask."""
    return sum(self.choices)

  @property
  def num_params(self) -> int:
    """Parameters of the distribution: logits, means, logarithms of deviations."""
    return self.num_logits + 2 * self.num_dims

  @property
  def stored(self) -> ArraySpec:
    """A stored action; float32 holds a choice exactly up to 2^24 alternatives."""
    return array_spec(np.float32 if self.num_dims else np.int32, self.size)

  @property
  def half_widths(self) -> tuple[float, ...]:
    """Half the width of each dimension, without overflow for the widest finite box."""
    return tuple(high / 2 - low / 2 for low, high in zip(self.low, self.high, strict=True))


def discrete(*choices: int) -> ActionSpec:
  """Returns the spec of independent discrete choices with so many alternatives each."""
  return ActionSpec(choices)


def continuous(low: Sequence[float], high: Sequence[float], *, squash: bool = False) -> ActionSpec:
  """Returns the spec of a box with these bounds."""
  return ActionSpec((), tuple(low), tuple(high), squash)


class EnvSpec(NamedTuple):
  """What the rest of the system must know of an environment."""

  obs: dict[str, ArraySpec]  # Of one observation, by key; a plain Box is under 'obs'.
  action: ActionSpec
  mask_size: int = 0  # Booleans of an action mask; 0 where the environment gives none.


def env_spec(
  observation_space: 'gymnasium.Space',
  action_space: 'gymnasium.Space',
  *,
  squash: bool = False,
) -> EnvSpec:
  """Returns the specs of an environment's spaces.

  Args:
    observation_space: a Box, or a Dict of Boxes. If the action has discrete parts, the key
      `action_mask` of a Dict is no observation: it has one number for every logit, in the order
      of `ActionSpec`, and zero forbids the alternative.
    action_space: what `action_spec` takes.
    squash: whether boxes in the action space are squashed onto, instead of clipped to.

  Raises:
    ValueError: a space is of a kind that is not supported; the message lists what is.
  """
  problems = []
  try:
    action = action_spec(action_space, squash=squash)
  except ValueError as error:
    action = None
    problems.append(str(error))
  parts, mask = _observation_parts(observation_space, action)
  obs = {key: _observation_spec(part) for key, part in parts.items()}
  problems += [f'observation space {parts[key]}' for key, spec in obs.items() if spec is None]
  if not parts:
    problems.append(f'observation space {observation_space}')
  if action and mask is not None and _flat_size(mask) != action.num_logits:
    problems.append(f'{MASK} {mask} for {action.num_logits} alternatives {action.choices}')
  if problems or action is None:
    raise ValueError(f'{" and ".join(problems)}: not supported. Supported: {SUPPORTED_SPACES}')
  mask_size = action.num_logits if mask is not None else 0
  return EnvSpec({key: spec for key, spec in obs.items() if spec}, action, mask_size)


def split_obs(env: EnvSpec, obs: Any) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
  """Splits what an environment observed into arrays by key and a boolean mask [L], if any."""
  if not isinstance(obs, dict):
    return {'obs': obs}, None
  mask = np.asarray(obs[MASK]).reshape(-1) != 0 if env.mask_size else None
  return {key: obs[key] for key in env.obs}, mask


def _observation_parts(
  space: 'gymnasium.Space', action: ActionSpec | None
) -> tuple[dict[str, 'gymnasium.Space'], 'gymnasium.Space | None']:
  from gymnasium import spaces

  if not isinstance(space, spaces.Dict):
    return {'obs': space}, None
  parts = dict(space.spaces)
  mask = parts.pop(MASK, None) if action is None or action.choices else None
  return parts, mask


def _flat_size(space: 'gymnasium.Space') -> int | None:
  """Numbers in a member of `space`, or none if that is not one array."""
  from gymnasium import spaces

  if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
    return math.prod(space.shape)
  return None


def _observation_spec(space: 'gymnasium.Space') -> ArraySpec | None:
  from gymnasium import spaces

  if not isinstance(space, spaces.Box) or len(space.shape) not in (1, 3):
    return None
  return array_spec(np.uint8 if space.dtype == np.uint8 else np.float32, *space.shape)


def action_spec(space: 'gymnasium.Space', *, squash: bool = False) -> ActionSpec:
  """Returns the description of an action space.

  Discrete and MultiDiscrete (of any start and shape), MultiBinary, Box of floats (of any shape and
  bounds), and Tuple and Dict of all these, nested or not. Parts are taken in the order of the
  space, which for a Dict made from a dictionary is that of the sorted keys.

  Raises:
    ValueError: a part is of another kind, or cannot be squashed onto.
  """
  from gymnasium import spaces

  choices, low, high, problems = [], [], [], []
  for leaf in _leaves(space):
    if isinstance(leaf, spaces.Discrete):
      choices.append(int(leaf.n))
    elif isinstance(leaf, spaces.MultiDiscrete):
      choices += leaf.nvec.reshape(-1).tolist()
    elif isinstance(leaf, spaces.MultiBinary):
      choices += [2] * math.prod(leaf.shape)
    elif isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating):
      low += leaf.low.reshape(-1).tolist()
      high += leaf.high.reshape(-1).tolist()
    else:
      problems.append(f'action space {leaf}')
  if problems:
    raise ValueError(' and '.join(problems))
  try:
    return ActionSpec(tuple(choices), tuple(low), tuple(high), squash)
  except ValueError as error:
    raise ValueError(f'action space {space} ({error})') from None


def _leaves(space: 'gymnasium.Space') -> Iterator['gymnasium.Space']:
  from gymnasium import spaces

  if isinstance(space, spaces.Tuple | spaces.Dict):
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
    for part in parts:
      yield from _leaves(part)
  else:
    yield space


def to_env_units(spec: ActionSpec, actions: np.ndarray) -> np.ndarray:
  """Maps stored actions [..., A] to numbers inside the space, [..., A] float64.

  Choices stay, counted from 0; box columns are squashed onto the bounds or clipped to them.
  """
  out = actions.astype(np.float64)
  if spec.num_dims:
    box = out[..., spec.num_choices :]
    if spec.squash:
      middle = np.array(spec.low) / 2 + np.array(spec.high) / 2
      box[...] = middle + np.tanh(box) * np.array(spec.half_widths)
    np.clip(box, spec.low, spec.high, out=box)
  return out


def action_decoder(space: 'gymnasium.Space', spec: ActionSpec) -> Callable[[np.ndarray], list[Any]]:
  """Returns `decode(actions)`: from stored actions [n, A] to n members of `space`.

  A Discrete gives an int, the other leaves arrays of their own dtype and shape that share no
  memory with `actions`; a Tuple gives a tuple, a Dict a dictionary.

  Raises:
    ValueError: `space` is not the one that `spec` describes.
  """
  from gymnasium import spaces

  described = action_spec(space, squash=spec.squash)
  if described != spec:
    raise ValueError(f'action space {space} gives {described}, but {spec} was expected')
  if isinstance(space, spaces.Discrete):
    start = int(space.start)
    return lambda actions: (actions[:, 0].astype(np.int64) + start).tolist()
  reader = _reader(space, iter(range(spec.num_choices)), iter(range(spec.num_choices, spec.size)))
  return lambda actions: [reader(row) for row in to_env_units(spec, actions)]


def _reader(
  space: 'gymnasium.Space', choices: Iterator[int], dims: Iterator[int]
) -> Callable[[np.ndarray], Any]:
  """Returns what reads a member from a row in the environment's units; takes its columns."""
  from gymnasium import spaces

  if isinstance(space, spaces.Tuple):
    parts = [_reader(part, choices, dims) for part in space.spaces]
    return lambda row: tuple(read(row) for read in parts)
  if isinstance(space, spaces.Dict):
    named = {key: _reader(part, choices, dims) for key, part in space.spaces.items()}
    return lambda row: {key: read(row) for key, read in named.items()}
  if isinstance(space, spaces.Discrete):
    column, start = next(choices), int(space.start)
    return lambda row: int(row[column]) + start
  shape, dtype = tuple(space.shape or ()), space.dtype
  source = dims if isinstance(space, spaces.Box) else choices
  columns = [next(source) for _ in range(math.prod(shape))]
  if isinstance(space, spaces.MultiDiscrete):
    starts = space.start
    return lambda row: np.asarray(row[columns].astype(dtype).reshape(shape) + starts, dtype)
  return lambda row: row[columns].astype(dtype).reshape(shape)


def random_action(
  spec: ActionSpec, rng: np.random.Generator, mask: np.ndarray | None = None
) -> np.ndarray:
  """Draws a stored action [A] whose member is uniform over the space, or over what `mask` allows.

  A dimension without finite bounds is normal around the point of the box nearest to zero.
  """
  out = np.zeros(spec.size, spec.stored.dtype)
  end = 0
  for i, n in enumerate(spec.choices):
    start, end = end, end + n
    allowed = np.arange(n) if mask is None else np.flatnonzero(mask[start:end])
    out[i] = rng.choice(allowed) if len(allowed) else rng.integers(n)
  dims = zip(spec.low, spec.high, spec.half_widths, strict=True)
  for i, (low, high, half) in enumerate(dims, spec.num_choices):
    if spec.squash:
      out[i] = rng.logistic(scale=0.5)  # Its tanh is uniform on [-1, 1].
    elif math.isfinite(low) and math.isfinite(high):
      out[i] = low / 2 + high / 2 + rng.uniform(-1.0, 1.0) * half
    else:
      out[i] = np.clip(rng.normal() + np.clip(0.0, low, high), low, high)
  return out
