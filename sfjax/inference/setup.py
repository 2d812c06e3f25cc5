"""Builds what an inference server acts with. Imports jax."""

import time
from collections.abc import Callable

import jax

from sfjax.config import core_size
from sfjax.entries import Shared
from sfjax.inference.act import make_act
from sfjax.inference.batching import bucket_sizes
from sfjax.inference.policies import PublishedPolicies
from sfjax.inference.server import batch_specs
from sfjax.metrics.stages import Stage, StageTimer
from sfjax.models.actor_critic import init_params, make_model
from sfjax.models.flat_params import flat_nbytes
from sfjax.shm.params import ParameterBuffer


def make_policies(
  shared: Shared, timer: StageTimer, should_stop: Callable[[], bool]
) -> PublishedPolicies | None:
  """Waits for the first parameters and compiles; returns None when told to stop meanwhile."""
  config, size = shared.config, core_size(shared.config)
  model = make_model(config, shared.env)
  template = jax.eval_shape(
    lambda key: init_params(model, key, shared.env, size), jax.random.key(0)
  )
  status = shared.map_status()
  while int(status['published'][0]) == 0:  # The learner allocates the buffer.
    if should_stop():
      return None
    timer.enter(Stage.START)
    time.sleep(0.01)
  policies = PublishedPolicies(
    make_act(model, shared.env.action),
    template=template,
    params=ParameterBuffer(
      shared.params, num_policies=config.train.num_policies, nbytes=flat_nbytes(template)
    ),
    num_policies=config.train.num_policies,
    specs=batch_specs(shared.topology, shared.env, size),
  )
  timer.enter(Stage.COMPILE)
  for policy in range(config.train.num_policies):
    policies.refresh(policy)
  policies.warm_up(bucket_sizes(shared.topology))
  return policies
