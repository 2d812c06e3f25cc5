"""What every network is made of: dense layers, initial weights, activation and precision."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sfjax.config import Activation, ComputeDtype, Init, ModelConfig

Initializer = Callable[..., jax.Array]

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
  Activation.ELU: nn.elu,
  Activation.RELU: nn.relu,
  Activation.TANH: jnp.tanh,
}


def make_initializer(init: Init, gain: float = 1.0) -> Initializer:
  """Returns the initial distribution of a kernel [..., inputs, outputs].

  Args:
    init: orthogonal ("Exact solutions to the nonlinear dynamics of learning in deep linear neural
      networks", Saxe et al. 2013, arXiv:1312.6120), uniform with the variance of Glorot and
      Bengio (2010), or Flax's own default, a normal with variance 1 / inputs.
    gain: multiplies every weight.
  """
  if init is Init.ORTHOGONAL:
    return nn.initializers.orthogonal(gain)
  if init is Init.XAVIER_UNIFORM:
    return nn.initializers.variance_scaling(gain**2, 'fan_avg', 'uniform')
  return nn.initializers.variance_scaling(gain**2, 'fan_in', 'truncated_normal')


class LayerOptions(NamedTuple):
  """What all layers of an encoder or a decoder have in common."""

  activation: Callable[[jax.Array], jax.Array] = nn.elu
  kernel_init: Initializer = nn.initializers.orthogonal()
  dtype: Any = jnp.float32  # Of products and activations; parameters are float32.


def compute_dtype(model: ModelConfig) -> Any:
  """Returns the precision of products and activations."""
  return jnp.bfloat16 if model.compute_dtype is ComputeDtype.BFLOAT16 else jnp.float32


def make_layer_options(model: ModelConfig) -> LayerOptions:
  """Returns the layer options of a configuration."""
  return LayerOptions(
    activation=_ACTIVATIONS[model.activation],
    kernel_init=make_initializer(model.init, model.init_gain),
    dtype=compute_dtype(model),
  )


class Mlp(nn.Module):
  """Dense layers, the activation after each; none of them is the identity."""

  layers: tuple[int, ...]
  options: LayerOptions = LayerOptions()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., n] to [..., layers[-1]] of the compute dtype."""
    x = x.astype(self.options.dtype)
    for size in self.layers:
      dense = nn.Dense(size, kernel_init=self.options.kernel_init, dtype=self.options.dtype)
      x = self.options.activation(dense(x))
    return x
