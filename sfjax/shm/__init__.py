"""Shared memory between the processes of a run: blocks, slab, queues, parameter buffer."""
