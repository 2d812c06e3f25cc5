"""What the server acts with while another process publishes without a pause."""

import multiprocessing
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from sfjax.inference.act import ActOutput
from sfjax.inference.policies import PublishedPolicies
from sfjax.inference.server import batch_specs
from sfjax.models.flat_params import flat_nbytes, flatten_params
from sfjax.shm.blocks import SharedBlock
from sfjax.shm.params import ParameterBuffer
from sfjax.specs import array_spec
from tests.fakes import CORE_SIZE, ENV, make_server, make_transport

POLICIES = 2
# `returned`: the newest version whose `publish` has returned; `learner`: the learner's count.
FLAGS = {
  'stop': array_spec(np.int64, 1),
  'returned': array_spec(np.int64, POLICIES),
  'learner': array_spec(np.int64, POLICIES),
}
PARAMS = {'w': np.ones(50_000, np.float32)}

spawn = multiprocessing.get_context('spawn')


def publish_without_pause(block: SharedBlock, flags_block: SharedBlock) -> None:
  flags = flags_block.map(FLAGS)
  buffer = ParameterBuffer(block, num_policies=POLICIES, nbytes=flat_nbytes(PARAMS))
  version, deadline = 1, time.monotonic() + 60
  while not flags['stop'][0] and time.monotonic() < deadline:
    version += 1
    for policy in range(POLICIES):
      params = {'w': np.full_like(PARAMS['w'], version)}
      buffer.publish(policy, version, flatten_params(params))
      flags['returned'][policy] = version
      flags['learner'][policy] = version
    time.sleep(1e-3)


def test_no_batch_is_stamped_below_a_version_whose_publish_had_returned():
  """Catches parameters that are looked at before the requests, once for all policies, or late."""
  transport = make_transport(envs=2)
  block, flags_block = SharedBlock(), SharedBlock()
  flags = flags_block.allocate(FLAGS)
  buffer = ParameterBuffer(block, num_policies=POLICIES, nbytes=flat_nbytes(PARAMS), allocate=True)
  for policy in range(POLICIES):
    buffer.publish(policy, 1, flatten_params(PARAMS))
  floors: list[np.ndarray] = []

  def act(params: Any, obs: Any, core: Any, first: Any, identity: Any, mask: Any) -> ActOutput:
    # The action is the version that the parameters hold. Whatever is published by the end of one
    # batch, the next must know.
    time.sleep(3e-3)
    action = jnp.full(len(core), params['w'][-1]).astype(jnp.int32)
    floors.append(flags['returned'].copy())
    return ActOutput(action[:, None], action * 0.5, action * 0.5, jnp.array(core), action)

  policies: Any = PublishedPolicies(
    act,
    template=PARAMS,
    params=buffer,
    num_policies=POLICIES,
    specs=batch_specs(transport.topology, ENV, CORE_SIZE),
  )
  server = make_server(
    transport, policies, num_policies=POLICIES, learner_versions=flags['learner']
  )
  publisher = spawn.Process(target=publish_without_pause, args=(block, flags_block))
  publisher.start()
  try:
    deadline = time.monotonic() + 30
    while flags['returned'][0] < 2:
      assert time.monotonic() < deadline
    versions = []
    table = transport.streams
    for tick in range(150):
      table['waiting'][:] = (0, 1)
      for policy in range(POLICIES):
        transport.requests.put(0, 0, 0, policy, tick)
      floors[:] = [flags['returned'].copy()]
      server.turn()
      stamped, newest = table['reply_version'].copy(), table['reply_learner_version']
      known = [floors[policy][policy] for policy in range(POLICIES)]
      assert (stamped >= known).all(), (stamped, known)
      assert (table['reply_action'][:, 0] == stamped).all(), 'parameters and their version differ'
      assert (newest >= stamped).all()
      versions.append(stamped)
  finally:
    flags['stop'][0] = 1
    publisher.join(30)
  assert publisher.exitcode == 0
  assert (np.diff(versions, axis=0) >= 0).all()
  assert np.unique(versions).size > 50, 'the publisher was too slow for the test to mean anything'
