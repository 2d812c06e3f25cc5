"""Environment workers: they step environments and fill rows of the slab. Free of jax."""
