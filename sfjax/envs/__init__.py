"""Environments under one contract; see `registry`. Free of jax."""
