"""Evaluation: plays a fixed number of episodes in each environment with a saved policy.

Every environment plays its share of the episodes to the end, so short episodes are not counted
more often than long ones. Imports jax.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from sfjax.actors.splits import episode_seed
from sfjax.checkpoints import Checkpoints
from sfjax.cleanup import remove_scratch
from sfjax.config import Config, core_size
from sfjax.envs.registry import EnvContext, make_env
from sfjax.inference.act import Act, make_act
from sfjax.learner.setup import initial_states
from sfjax.models.actor_critic import make_model
from sfjax.specs import EnvSpec, action_decoder, env_spec, split_obs
from sfjax.training import EXIT_BAD_INPUT, load_config

MAX_ENVS = 16
# Streams of an evaluation are numbered from here: none of its episodes is one of training's.
FIRST_STREAM = 1 << 20


class Episode(NamedTuple):
  """One finished episode."""

  episode_return: float  # Raw, before any reward scale.
  length: int  # Samples.
  truncated: bool


def evaluate(workdir: Path, *, episodes: int, deterministic: bool, checkpoint: str) -> int:
  """Scores a run folder's policy, prints a summary and last one JSON line; returns the exit code.

  Args:
    workdir: the run folder.
    episodes: how many to play.
    deterministic: take the likeliest action instead of sampling.
    checkpoint: 'latest' or a step.
  """
  logging.set_verbosity(logging.ERROR)  # Orbax warns that a run folder is only read.
  try:
    config = load_config(workdir)
    if checkpoint != 'latest' and not checkpoint.isdigit():
      raise ValueError(f"  --checkpoint is {checkpoint}; it must be 'latest' or a step")
    step = None if checkpoint == 'latest' else int(checkpoint)
    params, frames, act, step = load_policy(workdir, config, step=step, deterministic=deterministic)
  except (ValueError, FileNotFoundError, ImportError) as error:
    print(f'Cannot evaluate:\n{error}', file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT
  results = play(config, act, params, episodes=episodes)
  summary = summarize(results, deterministic=deterministic, checkpoint_frames=frames)
  mode = 'likeliest' if deterministic else 'sampled'
  print(
    f'{config.env.name}, checkpoint {step} ({frames:,} frames), {mode} actions: mean return '
    f'{summary["episode_return_mean"]:.2f} ± {summary["episode_return_stderr"]:.2f} (standard '
    f'error) over {episodes} episodes of {summary["episode_length_mean"]:.1f} samples'
  )
  print(json.dumps(summary), flush=True)
  return 0


def load_policy(
  workdir: Path, config: Config, *, step: int | None = None, deterministic: bool = False
) -> tuple[Any, int, Act, int]:
  """Loads policy 0 of a run folder.

  Args:
    workdir: the run folder.
    config: its configuration.
    step: the checkpoint; None: the newest.
    deterministic: see `make_act`.

  Returns:
    Its parameters, the frames it was trained on, its `act`, and the step.

  Raises:
    FileNotFoundError: there is no such checkpoint.
  """
  env = make_env(config.env.name, EnvContext(options=config.env.kwargs))
  spec = _spec(config, env)
  env.close()
  template = jax.eval_shape(lambda: initial_states(config, spec))
  restored = Checkpoints(workdir).restore(template, step)
  params = jax.device_put(restored.states[0].params)
  act = make_act(make_model(config, spec), spec.action, deterministic=deterministic)
  return params, restored.progress.frames[0], act, restored.step


def _spec(config: Config, env: Any) -> EnvSpec:
  squash = config.model.squash_actions
  return env_spec(env.observation_space, env.action_space, squash=squash)


def play(config: Config, act: Act, params: Any, *, episodes: int) -> list[Episode]:
  """Plays `episodes` episodes, an equal share in each of up to `MAX_ENVS` environments."""
  n = min(MAX_ENVS, episodes)
  scratch = tempfile.mkdtemp(prefix='sfjax-eval-')
  envs = []
  try:
    for i in range(n):
      context = EnvContext(
        index=i,
        env_id=FIRST_STREAM + i,
        seed=config.train.seed,
        frameskip=config.env.frameskip,
        options=config.env.kwargs,
        scratch=tempfile.mkdtemp(dir=scratch),
      )
      envs.append(make_env(config.env.name, context))
    shares = [episodes // n + (i < episodes % n) for i in range(n)]
    return _play(config, act, params, envs, shares)
  finally:
    for env in envs:
      env.close()
    remove_scratch(scratch)


def _play(
  config: Config, act: Act, params: Any, envs: list[Any], shares: list[int]
) -> list[Episode]:
  n, seed = len(envs), config.train.seed
  streams = FIRST_STREAM + np.arange(n)
  episode, steps, returns = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
  core: Any = np.zeros((n, core_size(config)), np.float32)
  obs = [env.reset(seed=episode_seed(seed, int(streams[i]), 0))[0] for i, env in enumerate(envs)]
  spec = _spec(config, envs[0])
  decode = action_decoder(envs[0].action_space, spec.action)
  results = []
  while any(episode[i] < shares[i] for i in range(n)):
    fixed = (np.full(n, seed), np.zeros(n, np.int64), streams, episode, steps)
    identity: Any = np.stack(fixed, axis=1).astype(np.int32)
    first: Any = steps == 0
    arrays, masks = zip(*(split_obs(spec, one) for one in obs), strict=True)
    batch = {key: np.stack([one[key] for one in arrays]) for key in spec.obs}
    mask = np.stack(masks) if spec.mask_size else None
    output = act(params, batch, core, first, identity, mask)
    actions, core = decode(np.asarray(output.action)), np.asarray(output.core)
    for i in range(n):
      if episode[i] >= shares[i]:
        continue
      obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
      returns[i] += float(reward)
      steps[i] += 1
      if terminated or truncated:
        results.append(Episode(float(returns[i]), int(steps[i]), not terminated))
        episode[i] += 1
        steps[i], returns[i] = 0, 0.0
        obs[i], _ = envs[i].reset(seed=episode_seed(seed, int(streams[i]), int(episode[i])))
  return results


def summarize(
  results: list[Episode], *, deterministic: bool, checkpoint_frames: int
) -> dict[str, Any]:
  """Returns the statistics of some episodes as plain JSON values."""
  returns = np.array([result.episode_return for result in results])
  stderr = returns.std(ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else 0.0
  return {
    'episodes': len(results),
    'episode_return_mean': float(returns.mean()),
    'episode_return_stderr': float(stderr),
    'episode_return_median': float(np.median(returns)),
    'episode_return_min': float(returns.min()),
    'episode_return_max': float(returns.max()),
    'episode_length_mean': float(np.mean([result.length for result in results])),
    'truncated_episodes': sum(result.truncated for result in results),
    'deterministic': deterministic,
    'checkpoint_frames': checkpoint_frames,
  }
