"""Shapes and dtypes of what an environment exchanges with us, from its Gymnasium spaces."""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
  import gymnasium

SUPPORTED_SPACES = (
  'observations: Box of uint8 [height, width, channels] or Box of numbers [n]; actions: Discrete'
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


class EnvSpec(NamedTuple):
  """What the rest of the system must know of an environment."""

  obs: dict[str, ArraySpec]  # Of one observation, by key; a plain Box is under 'obs'.
  num_actions: int


def array_spec(dtype: str | type | np.dtype, *shape: int) -> ArraySpec:
  """Returns the spec of an array of `dtype` with dimensions `shape`."""
  return ArraySpec(tuple(shape), np.dtype(dtype))


def env_spec(observation_space: 'gymnasium.Space', action_space: 'gymnasium.Space') -> EnvSpec:
  """Returns the array specs of an environment's spaces.

  Raises:
    ValueError: a space is of a kind that is not supported; the message lists what is.
  """
  from gymnasium import spaces

  problems = []
  if not isinstance(observation_space, spaces.Box) or len(observation_space.shape) not in (1, 3):
    problems.append(f'observation space {observation_space}')
  if not isinstance(action_space, spaces.Discrete) or action_space.start != 0:
    problems.append(f'action space {action_space}')
  if problems:
    raise ValueError(f'{" and ".join(problems)}: not supported. Supported: {SUPPORTED_SPACES}')
  dtype = observation_space.dtype if observation_space.dtype == np.uint8 else np.float32
  obs = {'obs': ArraySpec(tuple(observation_space.shape), np.dtype(dtype))}  # pyright: ignore[reportArgumentType]
  return EnvSpec(obs, int(action_space.n))  # pyright: ignore[reportAttributeAccessIssue]
