"""Encoders: from observations [N, ...] by key to features [N, F]."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from sfjax.config import Encoder, ModelConfig
from sfjax.models.convolution import convolution, max_pool
from sfjax.models.layers import LayerOptions, Mlp, make_layer_options
from sfjax.models.normalizers import Moments, fold_into_convolution, normalize
from sfjax.specs import ArraySpec

Layers = tuple[tuple[int, int, int], ...]

CONV_LAYERS: dict[Encoder, Layers] = {  # Features, kernel, stride.
  Encoder.CONV_SIMPLE: ((32, 8, 4), (64, 4, 2), (128, 3, 2)),
  Encoder.CONV_ATARI: ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
  Encoder.CONV_IMPALA: ((16, 8, 4), (32, 4, 2)),
}


class Conv(nn.Module):
  """A convolution with a bias; bytes are read as 0 to 1."""

  features: int
  size: int
  stride: int = 1
  padding: int = 0
  options: LayerOptions = LayerOptions()

  @nn.compact
  def __call__(self, x: jax.Array, moments: Moments | None = None) -> jax.Array:
    """Convolves [N, H, W, C] into [N, H', W', features] of the compute dtype.

    With the `moments` of its channels, x is read as if it had been normalised.
    """
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', self.options.kernel_init, shape)
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    if moments is not None and x.dtype == jnp.uint8:
      kernel, bias = fold_into_convolution(moments, kernel, bias, dtype=self.options.dtype)
    elif moments is not None:
      x = normalize(moments, x)
    elif x.dtype == jnp.uint8:
      kernel = kernel / 255.0  # Scaling the weights instead of the pixels keeps patches in bytes.
    kernel, bias = kernel.astype(self.options.dtype), bias.astype(self.options.dtype)
    out = convolution(x, kernel, stride=self.stride, padding=self.padding)
    return out + bias[None, None, None]


class ConvEncoder(nn.Module):
  """Convolutions without padding, then dense layers; the activation after each of them."""

  convs: Layers = CONV_LAYERS[Encoder.CONV_SIMPLE]
  dense: tuple[int, ...] = (512,)
  options: LayerOptions = LayerOptions()

  @nn.compact
  def __call__(self, obs: jax.Array, moments: Moments | None = None) -> jax.Array:
    """Encodes pixels [N, H, W, C] into [N, dense[-1]]."""
    x = obs
    for i, (features, size, stride) in enumerate(self.convs):
      conv = Conv(features, size, stride, options=self.options, name=f'conv_{i}')
      x = self.options.activation(conv(x, moments if i == 0 else None))
    return Mlp(self.dense, self.options, name='dense')(x.reshape(x.shape[0], -1))


class ResidualBlock(nn.Module):
  """x + conv(act(conv(act(x)))) with 3 × 3 kernels that keep the size."""

  options: LayerOptions = LayerOptions()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [N, H, W, C] to the same shape."""
    out = x
    for _ in range(2):
      conv = Conv(x.shape[-1], 3, padding=1, options=self.options)
      out = conv(self.options.activation(out))
    return x + out


class ResNetEncoder(nn.Module):
  """The deep encoder of "IMPALA" (Espeholt et al. 2018, arXiv:1802.01561, figure 3), then dense.

  Each group is a 3 × 3 convolution, a max-pool that halves the image, and two residual blocks.
  """

  groups: tuple[int, ...] = (16, 32, 32)
  dense: tuple[int, ...] = (512,)
  options: LayerOptions = LayerOptions()

  @nn.compact
  def __call__(self, obs: jax.Array, moments: Moments | None = None) -> jax.Array:
    """Encodes pixels [N, H, W, C] into [N, dense[-1]]."""
    x = obs
    for i, features in enumerate(self.groups):
      conv = Conv(features, 3, padding=1, options=self.options, name=f'group_{i}')
      x = max_pool(conv(x, moments if i == 0 else None))
      for j in range(2):
        x = ResidualBlock(self.options, name=f'group_{i}_block_{j}')(x)
    x = self.options.activation(x)
    return Mlp(self.dense, self.options, name='dense')(x.reshape(x.shape[0], -1))


class ObsEncoder(nn.Module):
  """An encoder for each key of an observation; features are joined in the order of the keys."""

  encoders: Mapping[str, nn.Module]  # A FrozenDict: modules must be hashable.

  def __call__(
    self, obs: Mapping[str, jax.Array], moments: Mapping[str, Moments] | None = None
  ) -> jax.Array:
    """Encodes [N, ...] by key into [N, F]; keys without an encoder are not looked at.

    Keys that `moments` has are normalised first.
    """
    moments = moments or {}
    features = [self._encode(key, obs[key], moments.get(key)) for key in sorted(self.encoders)]
    return jnp.concatenate(features, axis=-1)

  def _encode(self, key: str, x: jax.Array, moments: Moments | None) -> jax.Array:
    if moments is None:
      return self.encoders[key](x)
    if x.ndim > 2:  # The first convolution normalises, so that bytes stay bytes.
      return self.encoders[key](x, moments)
    return self.encoders[key](normalize(moments, x.astype(jnp.float32)))


def _image_encoder(model: ModelConfig, options: LayerOptions) -> nn.Module:
  dense = tuple(model.conv_dense_layers)
  if model.encoder is Encoder.RESNET:
    return ResNetEncoder(dense=dense, options=options)
  return ConvEncoder(CONV_LAYERS[model.encoder], dense, options)


def make_encoder(model: ModelConfig, obs: Mapping[str, ArraySpec]) -> ObsEncoder:
  """Builds the encoder of observations: images by the one that is configured, vectors by an MLP."""
  options = make_layer_options(model)
  encoders = {
    key: _image_encoder(model, options)
    if len(spec.shape) == 3
    else Mlp(tuple(model.mlp_layers), options)
    for key, spec in obs.items()
  }
  return ObsEncoder(FrozenDict(encoders))
