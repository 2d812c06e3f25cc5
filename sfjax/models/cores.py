"""Recurrent cores: what a policy remembers between the steps of an episode.

A core is called with features [T, B, F], its state [B, size] before the first step, and `first`
[T, B], true where the step's observation starts an episode: there the state is set to zero. It
returns outputs [T, B, ...] and the state after the last step. The state is one flat float32 array,
whatever the core, as it lies in the slab.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from sfjax.config import Core, ModelConfig
from sfjax.models.layers import Initializer, compute_dtype, make_initializer


def _scan(
  step: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
  core: jax.Array,
  inputs: jax.Array,
  first: jax.Array,
  bptt: int | None,
) -> tuple[jax.Array, jax.Array]:
  """Unrolls `step(core, input) -> (core, output)` with the reset rule; see `GRU` for `bptt`."""

  def reset_and_step(core: jax.Array, at: Any) -> tuple[jax.Array, jax.Array]:
    t, x, first = at
    if bptt is not None:
      core = jnp.where(t % bptt == 0, jax.lax.stop_gradient(core), core)
    return step(jnp.where(first[:, None], 0.0, core), x)

  core, outputs = jax.lax.scan(reset_and_step, core, (jnp.arange(len(first)), inputs, first))
  return outputs, core


class _Cell(nn.Module):
  """What a GRU and an LSTM have in common.

  The input products of all steps are one matrix product; only the recurrent ones are in the loop.
  Products take the compute dtype; state, sums and gates are float32.

  Attributes:
    size: width of the output.
    bptt: steps that the gradient goes back through the state, counted from the first slot: it
      stops at every multiple ("recurrence" in Sample Factory). None: through all of them. Values
      are the same.
    kernel_init: initial distribution of both kernels.
    dtype: precision of the products.
  """

  size: int = 512
  bptt: int | None = None
  kernel_init: Initializer = nn.initializers.orthogonal()
  dtype: Any = jnp.float32

  def _products(
    self, features: jax.Array, gates: int, bias_init: Initializer
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns the input products [T, B, gates · size], and the recurrent product as a function."""
    width = gates * self.size
    dense = nn.Dense(
      width, kernel_init=self.kernel_init, bias_init=bias_init, dtype=self.dtype, name='inputs'
    )
    kernel = self.param('recurrent_kernel', self.kernel_init, (self.size, width))
    kernel = kernel.astype(self.dtype)

    def recur(hidden: jax.Array) -> jax.Array:
      return jnp.matmul(hidden.astype(self.dtype), kernel, preferred_element_type=jnp.float32)

    return dense(features), recur


class GRU(_Cell):
  """A gated recurrent unit; its state, of width `size`, is its output.

  "Learning Phrase Representations using RNN Encoder–Decoder" (Cho et al. 2014, arXiv:1406.1078),
  with the reset gate after the recurrent product, as cuDNN and Sample Factory have it.
  """

  @nn.compact
  def __call__(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Unrolls features [T, B, F] from the state `core` [B, size]; see the module's text."""
    inputs, recur = self._products(features, 3, nn.initializers.zeros)
    bias = self.param('recurrent_bias', nn.initializers.zeros, (self.size,))

    def step(core: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
      x_r, x_z, x_n = jnp.split(x, 3, axis=-1)
      h_r, h_z, h_n = jnp.split(recur(core), 3, axis=-1)
      update = nn.sigmoid(x_z + h_z)
      candidate = jnp.tanh(x_n + nn.sigmoid(x_r + h_r) * (h_n + bias[None]))
      core = (1.0 - update) * candidate + update * core
      return core, core

    return _scan(step, core, inputs, first, self.bptt)


def _forget_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
  del key
  size = shape[0] // 4
  return jnp.zeros(shape, dtype).at[size : 2 * size].set(1.0)


class LSTM(_Cell):
  """Long short-term memory; its state is the output and the cell side by side, [h, c], 2 · `size`.

  "Long Short-Term Memory" (Hochreiter & Schmidhuber 1997) with forget gates, whose bias starts at
  1: a network that has learned nothing yet remembers ("An Empirical Exploration of Recurrent
  Network Architectures", Jozefowicz et al. 2015). Gates lie in the order input, forget, cell,
  output.
  """

  @nn.compact
  def __call__(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Unrolls features [T, B, F] from the state `core` [B, 2 · size]; see the module's text."""
    inputs, recur = self._products(features, 4, _forget_bias)

    def step(core: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
      hidden, cell = jnp.split(core, 2, axis=-1)
      admit, keep, candidate, show = jnp.split(x + recur(hidden), 4, axis=-1)
      cell = nn.sigmoid(keep) * cell + nn.sigmoid(admit) * jnp.tanh(candidate)
      hidden = nn.sigmoid(show) * jnp.tanh(cell)
      return jnp.concatenate([hidden, cell], axis=-1), hidden

    return _scan(step, core, inputs, first, self.bptt)


class Stack(nn.Module):
  """Cores of the same kind and size on top of each other; their states lie side by side."""

  layers: tuple[nn.Module, ...]

  def __call__(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Unrolls layer after layer, each on the outputs of the one below."""
    states = []
    for layer, state in zip(self.layers, jnp.split(core, len(self.layers), axis=-1), strict=True):
      features, state = layer(features, state, first)
      states.append(state)
    return features, jnp.concatenate(states, axis=-1)


class NoCore(nn.Module):
  """A policy without memory; its state has size 0."""

  def __call__(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns `features` and `core` as they are."""
    del first
    return features, core


def make_core(model: ModelConfig, bptt: int | None) -> nn.Module:
  """Builds the core of a configuration.

  The gain of the initial weights is for layers that an activation follows; gates take 1.
  """
  if model.core is Core.NONE:
    return NoCore()
  kind = {Core.GRU: GRU, Core.LSTM: LSTM}[model.core]
  return Stack(
    tuple(
      kind(model.core_size, bptt, make_initializer(model.init), compute_dtype(model))
      for _ in range(model.core_layers)
    )
  )
