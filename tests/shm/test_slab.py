"""How workers, streams and rows are numbered, also when environments do not divide evenly."""

from hypothesis import given
from hypothesis import strategies as st

from sfjax.shm.slab import Topology


@given(
  worker_envs=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
  splits=st.integers(1, 4),
  rows=st.integers(1, 3),
)
def test_every_stream_and_row_has_one_owner(worker_envs, splits, rows):
  """Catches streams of two splits or none, an empty split, and a row of another worker."""
  topology = Topology(worker_envs=worker_envs, num_splits=splits, rows_per_stream=rows, rollout=1)
  owners = [
    (worker, split, stream)
    for worker in range(topology.num_workers)
    for split in topology.splits_of(worker)
    for stream in range(topology.num_streams)[topology.streams_of(worker, split)]
  ]
  assert [stream for *_, stream in owners] == list(range(sum(worker_envs)))
  for worker, envs in enumerate(worker_envs):
    sizes = [sum((w, s) == (worker, split) for w, s, _ in owners) for split in range(splits)]
    assert sum(sizes) == envs
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= topology.largest_split
    assert all(sizes[split] for split in topology.splits_of(worker))
    assert topology.first_streams[worker] == min(s for w, _, s in owners if w == worker)
  for worker, _, stream in owners:
    for row in range(stream * rows, (stream + 1) * rows):
      assert topology.stream_of_row(row) == stream
      assert topology.worker_of_row(row) == worker
