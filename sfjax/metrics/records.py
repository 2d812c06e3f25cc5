"""Records that travel to the runtime: finished episodes and updates of the learner."""

import numpy as np

# One finished episode of one stream. `length` counts samples, `tics` what the simulator advanced.
EPISODE = np.dtype(
  [
    ('worker', 'i4'),
    ('stream', 'i4'),
    ('policy', 'i4'),
    ('truncated', 'i4'),
    ('length', 'i8'),
    ('tics', 'i8'),
    ('episode_return', 'f8'),
  ]
)

# Over the played samples of a batch, when it came. The mean has two causes: the weights that acted
# were not the learner's newest then (stale), and versions passed while the row waited (backlog).
LAG_METRICS = (
  'lag_updates_mean',
  'lag_updates_max',
  'lag_updates_stale_mean',
  'lag_updates_backlog_mean',
)
# Means over one update's valid samples unless the name says otherwise.
UPDATE_METRICS = (
  *LAG_METRICS,
  'valid_share',
  'loss',
  'policy_loss',
  'value_loss',
  'entropy',
  'approx_kl',
  'ratio_mean',
  'ratio_max',
  'clipped_share',
  'rho_mean',
  'explained_variance',
  'advantage_std',
  'value_mean',
  'target_mean',
  'grad_norm',
  'param_norm',
)
UPDATE = np.dtype([('policy', 'i8'), ('version', 'i8')] + [(name, 'f8') for name in UPDATE_METRICS])
