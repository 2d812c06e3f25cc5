"""Encoders: from observations [N, ...] to features [N, F]."""

import flax.linen as nn
import jax
import jax.numpy as jnp

_orthogonal = nn.initializers.orthogonal


def _patches(x: jax.Array, kernel: int, stride: int) -> jax.Array:
  """Gathers the [N, H', W', kernel·kernel·C] inputs of a valid convolution.

  Where the kernel is a multiple of the stride, blocks of stride × stride pixels are moved whole:
  fewer and longer copies. `_patch_weights` orders the weights alike.
  """
  height = (x.shape[1] - kernel) // stride + 1
  width = (x.shape[2] - kernel) // stride + 1
  if kernel % stride or stride == 1:
    return jnp.concatenate(
      [
        x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
        for i in range(kernel)
        for j in range(kernel)
      ],
      axis=-1,
    )
  blocks = kernel // stride
  rows, columns = height - 1 + blocks, width - 1 + blocks
  x = x[:, : rows * stride, : columns * stride]
  x = x.reshape(x.shape[0], rows, stride, columns, stride * x.shape[3]).swapaxes(2, 3)
  x = x.reshape(x.shape[0], rows, columns, -1)
  return jnp.concatenate(
    [x[:, i : i + height, j : j + width] for i in range(blocks) for j in range(blocks)], axis=-1
  )


def _patch_weights(kernel: jax.Array, stride: int) -> jax.Array:
  """Reshapes a [k, k, C, F] kernel to the [k·k·C, F] matrix that multiplies `_patches`."""
  size, _, channels, features = kernel.shape
  if size % stride == 0 and stride > 1:
    blocks = size // stride
    kernel = kernel.reshape(blocks, stride, blocks, stride, channels, features).swapaxes(1, 2)
  return kernel.reshape(-1, features)


def _patch_convolution(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
  patches = _patches(x, kernel.shape[0], stride).astype(kernel.dtype)
  out = patches.reshape(-1, patches.shape[-1]) @ _patch_weights(kernel, stride)
  return out.reshape(*patches.shape[:3], -1)


def convolution(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
  """Convolves without padding.

  On the CPU as a matrix product over gathered patches: forward and backward take a third of the
  time of XLA's convolution there, and its gradient stays fast inside a device loop, which that of
  XLA's convolution does not (15 to 25 times slower).

  Args:
    x: [N, H, W, C].
    kernel: [k, k, C, F].
    stride: step between windows in pixels.

  Returns:
    [N, (H - k) // stride + 1, (W - k) // stride + 1, F].
  """
  if jax.default_backend() == 'cpu':
    return _patch_convolution(x, kernel, stride)
  return jax.lax.conv_general_dilated(
    x.astype(kernel.dtype),
    kernel,
    (stride, stride),
    'VALID',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


class ConvEncoder(nn.Module):
  """The small convolutional encoder of Sample Factory: 32·8·4, 64·4·2, 128·3·2, then dense."""

  size: int = 512
  layers: tuple[tuple[int, int, int], ...] = ((32, 8, 4), (64, 4, 2), (128, 3, 2))

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Encodes pixels [N, H, W, C] uint8, read as 0 to 1, into [N, size]."""
    x = obs
    scale = 1.0 / 255.0 if obs.dtype == jnp.uint8 else 1.0
    for i, (features, size, stride) in enumerate(self.layers):
      shape = (size, size, x.shape[-1], features)
      kernel = self.param(f'conv_{i}', _orthogonal(1.0), shape)
      bias = self.param(f'conv_{i}_bias', nn.initializers.zeros, (features,))
      # Scaling the weights instead of the pixels keeps the patches in bytes.
      x = nn.elu(convolution(x, kernel * scale, stride) + bias)
      scale = 1.0
    x = x.reshape(x.shape[0], -1)
    return nn.elu(nn.Dense(self.size, kernel_init=_orthogonal(1.0))(x))


class MlpEncoder(nn.Module):
  """Fully connected layers over a flat observation."""

  layers: tuple[int, ...] = (64, 64)

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Encodes vectors [N, n] into [N, layers[-1]]."""
    x = obs.astype(jnp.float32)
    for size in self.layers:
      x = nn.tanh(nn.Dense(size, kernel_init=_orthogonal(2.0**0.5))(x))
    return x
