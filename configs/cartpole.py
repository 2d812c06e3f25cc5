"""CartPole-v1 from its four numbers."""

from sfjax import config as config_lib


def get_config() -> config_lib.Config:
  """Returns the configuration."""
  config = config_lib.Config(name='cartpole')
  config.env.name = 'CartPole-v1'
  config.model.encoder = config_lib.Encoder.MLP
  config.model.core = config_lib.Core.NONE
  config.train.max_frames = 1_000_000
  return config
