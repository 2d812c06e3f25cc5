"""Flax modules of a policy and the distributions over its actions."""
