"""Which streams a set of requests means, and how they are padded to a batch."""

from typing import NamedTuple

import numpy as np

from sfjax.shm.slab import Topology

Arrays = dict[str, np.ndarray]


class Selection(NamedTuple):
  """The streams to serve for some requests of one policy."""

  streams: np.ndarray  # [n] stream numbers.
  generation: np.ndarray  # [n] of the request, to tag the answer.
  tick: np.ndarray  # [n] likewise.
  served: list[int]  # Streams per request.


def bucket_sizes(topology: Topology) -> tuple[int, ...]:
  """Batch sizes that are compiled: multiples of a split, doubling, up to every stream."""
  sizes, size = [], topology.largest_split
  while size < topology.num_streams:
    sizes.append(size)
    size *= 2
  return (*sizes, topology.num_streams)


def select(requests: np.ndarray, topology: Topology, table: Arrays, policy: int) -> Selection:
  """Finds the streams that wait for `policy` behind `requests` (records of `REQUEST`).

  Requests of a generation that the stream table no longer shows are served nothing.
  """
  streams, generation, tick, served = [], [], [], []
  for request in requests:
    part = topology.streams_of(int(request['worker']), int(request['split']))
    waits = (table['waiting'][part] == policy) & (
      table['generation'][part] == request['generation']
    )
    chosen = np.flatnonzero(waits) + part.start
    streams.append(chosen)
    generation.append(np.full(len(chosen), request['generation'], np.int32))
    tick.append(np.full(len(chosen), request['tick'], np.int64))
    served.append(len(chosen))
  return Selection(
    np.concatenate(streams), np.concatenate(generation), np.concatenate(tick), served
  )
