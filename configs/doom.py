"""ViZDoom from pixels: `--config=configs/doom.py:<scenario>`, `basic` without an argument."""

from sfjax import config as config_lib


def get_config(scenario: str = 'basic') -> config_lib.Config:
  """Returns the configuration of a scenario."""
  config = config_lib.Config(name=f'doom_{scenario}')
  config.env.name = f'doom:{scenario}'
  config.env.frameskip = 4
  if scenario == 'basic':
    config.env.reward_scale = 0.01
    config.train.stop_at_return = 80.0
  return config
