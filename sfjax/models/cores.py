"""Recurrent cores: what a policy remembers between the steps of an episode."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class GRU(nn.Module):
  """A gated recurrent unit whose state is set to zero where an episode starts.

  "Learning Phrase Representations using RNN Encoder–Decoder" (Cho et al. 2014, arXiv:1406.1078),
  with the reset gate after the recurrent product, as cuDNN and Sample Factory have it. The input
  products of all steps are one matrix product; only the recurrent ones are in the loop.
  """

  size: int = 512

  @nn.compact
  def __call__(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Unrolls the core.

    Args:
      features: [T, B, F].
      core: [B, size] state before the first step.
      first: [T, B] true where the step's observation starts an episode.

    Returns:
      Outputs [T, B, size] and the state after the last step [B, size].
    """
    inputs = nn.Dense(3 * self.size, kernel_init=nn.initializers.orthogonal())(features)
    kernel = self.param(
      'recurrent_kernel', nn.initializers.orthogonal(), (self.size, 3 * self.size)
    )
    bias = self.param('recurrent_bias', nn.initializers.zeros, (self.size,))

    def step(core: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      x, first = at
      core = jnp.where(first[:, None], 0.0, core)
      x_r, x_z, x_n = jnp.split(x, 3, axis=-1)
      h_r, h_z, h_n = jnp.split(core @ kernel, 3, axis=-1)
      update = nn.sigmoid(x_z + h_z)
      candidate = jnp.tanh(x_n + nn.sigmoid(x_r + h_r) * (h_n + bias[None]))
      core = (1.0 - update) * candidate + update * core
      return core, core

    core, outputs = jax.lax.scan(step, core, (inputs, first))
    return outputs, core


class NoCore(nn.Module):
  """A policy without memory; its state has size 0."""

  def __call__(
    self, features: jax.Array, core: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns `features` and `core` as they are."""
    del first
    return features, core
