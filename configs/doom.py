"""ViZDoom from pixels: `--config=configs/doom.py:<scenario>`, `basic` without an argument."""

from sfjax import config as config_lib


def get_config(scenario: str = 'basic') -> config_lib.Config:
  """Returns the configuration of a scenario."""
  config = config_lib.Config(name=f'doom_{scenario}')
  config.env.name = f'doom:{scenario}'
  config.env.frameskip = 4
  config.sampler.envs_per_worker = 16
  if scenario == 'basic':
    config.env.reward_scale = 0.01
    config.train.stop_at_return = 80.0
    config.model.core = config_lib.Core.NONE
    config.learner.batch_size = 256
    config.learner.learning_rate = 1e-3
    config.loss.clip_ratio = 0.2
  return config
