"""Distributions over actions: pure functions of a policy's outputs."""

import jax
import jax.numpy as jnp


def sample(key: jax.Array, logits: jax.Array) -> jax.Array:
  """Draws an action. `logits`: [num_actions]; returns a scalar int32."""
  return jax.random.categorical(key, logits).astype(jnp.int32)


def mode(logits: jax.Array) -> jax.Array:
  """The likeliest action. `logits`: [..., num_actions]; returns [...] int32."""
  return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def log_prob(logits: jax.Array, actions: jax.Array) -> jax.Array:
  """Log-probability of `actions` [...] under `logits` [..., num_actions]."""
  log_probs = jax.nn.log_softmax(logits)
  return jnp.take_along_axis(log_probs, actions[..., None].astype(jnp.int32), axis=-1)[..., 0]


def entropy(logits: jax.Array) -> jax.Array:
  """Entropy in nats of `logits` [..., num_actions]; returns [...]."""
  log_probs = jax.nn.log_softmax(logits)
  return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
