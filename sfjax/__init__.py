"""sfjax: asynchronous PPO from pixels on one machine, in JAX.

This file imports nothing: environment workers import `sfjax` modules and must stay free of jax.
"""

__version__ = '0.1.0'
