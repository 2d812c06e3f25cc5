"""The inference server: one batched policy step for whatever waits."""
