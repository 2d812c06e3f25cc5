"""Which policy a stream acts with."""

import numpy as np


def policies_of_streams(streams: np.ndarray, num_policies: int) -> np.ndarray:
  """Assigns streams to policies in turn, so that every policy gets an equal share.

  Args:
    streams: [n] stream numbers.
    num_policies: P.

  Returns:
    [n] int32 policy of each stream.
  """
  return (streams % num_policies).astype(np.int32)
