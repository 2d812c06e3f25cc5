"""Slow float64 NumPy oracles, written from the papers' sums and sharing nothing with sfjax."""

from typing import NamedTuple

import numpy as np


class Trajectory(NamedTuple):
  """One stream's steps, [T] each; a cut is a truncation, its `v_t` the final observation's."""

  v_tm1: np.ndarray
  v_t: np.ndarray
  r_t: np.ndarray
  terminated: np.ndarray
  cut: np.ndarray
  ratio: np.ndarray

  def args(self, gamma: float) -> tuple[np.ndarray, ...]:
    """The arguments v_tm1, v_t, r_t, discount_t, done_t of `gae` and `vtrace`."""
    discount = np.where(self.terminated, 0.0, gamma).astype(np.float32)
    return self.v_tm1, self.v_t, self.r_t, discount, self.terminated | self.cut


def random_trajectory(seed: int, steps: int, *, ends: bool = True) -> Trajectory:
  rng = np.random.default_rng(seed)
  terminated, cut = rng.random((2, steps)) < (0.25 if ends else 0.0)
  v_tm1, other, r_t = rng.normal(size=(3, steps)).astype(np.float32)
  # Inside an episode the next value is the next step's; at an end it is another number.
  v_t = np.where(terminated | cut, other, np.append(v_tm1[1:], other[-1]))
  ratio = np.exp(rng.normal(size=steps)).astype(np.float32)
  return Trajectory(v_tm1, v_t, r_t, terminated, cut, ratio)


def vtrace_sum(x: Trajectory, gamma: float, rho_bar: float, c_bar: float, lambda_: float = 1.0):
  """Targets and advantages: eq. 1 of IMPALA for every s, summed up to the episode's end, with the
  λ of its remark 2; an advantage looks one step ahead with 1 - λ, and to the targets with λ."""
  steps = len(x.r_t)
  v, v_next, r = (a.astype(np.float64) for a in (x.v_tm1, x.v_t, x.r_t))
  rho, c = np.minimum(rho_bar, x.ratio), np.minimum(c_bar, x.ratio)
  after = np.where(x.terminated, 0.0, v_next)
  targets, last = np.array(v), _last_steps(x)
  for s in range(steps):
    for t in range(s, last[s] + 1):
      delta = rho[t] * (r[t] + gamma * after[t] - v[t])
      targets[s] += gamma ** (t - s) * np.prod(lambda_ * c[s:t]) * delta
  advantages = np.zeros(steps)
  for s in range(steps):
    following = targets[s + 1] if s < last[s] else after[s]
    ahead = lambda_ * following + (1 - lambda_) * after[s]
    advantages[s] = r[s] + gamma * ahead - v[s]
  return targets, advantages


def gae_sum(x: Trajectory, gamma: float, lambda_: float):
  """Targets and advantages: eq. 16 of the GAE paper, summed up to the episode's end."""
  steps = len(x.r_t)
  v, v_next, r = (a.astype(np.float64) for a in (x.v_tm1, x.v_t, x.r_t))
  after, last = np.where(x.terminated, 0.0, v_next), _last_steps(x)
  advantages = np.zeros(steps)
  for s in range(steps):
    for t in range(s, last[s] + 1):
      advantages[s] += (gamma * lambda_) ** (t - s) * (r[t] + gamma * after[t] - v[t])
  return v + advantages, advantages


def _last_steps(x: Trajectory) -> list[int]:
  """For every step, the last step of its episode inside the trajectory."""
  ends = [t for t in range(len(x.r_t)) if x.terminated[t] or x.cut[t]] + [len(x.r_t) - 1]
  return [min(end for end in ends if end >= s) for s in range(len(x.r_t))]
