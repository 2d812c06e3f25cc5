"""Environments: how a name becomes a Gymnasium environment; free of jax, workers import it."""
