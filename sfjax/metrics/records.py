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

# Over the played samples of a batch, when it came: the whole lag and its two causes. The weights
# that acted were not the learner's newest then (stale); versions passed while the row waited
# (backlog).
LAG_METRICS = tuple(
  f'lag_updates_{cause}{statistic}'
  for cause in ('', 'stale_', 'backlog_')
  for statistic in ('mean', 'p50', 'p90', 'max')
)
# The parts of the losses that samples of so much lag have, and the share of those samples; parts of
# all buckets add up to the whole.
BUCKET_METRICS = tuple(
  f'{name}_lag_{bucket}'
  for name in ('share', 'policy_loss', 'value_loss')
  for bucket in ('0_1', '2_4', '5_9', '10_up')
)
# Means over one update's valid samples unless the name says otherwise.
UPDATE_METRICS = (
  *LAG_METRICS,
  'valid_share',
  'dropped_share',
  'loss',
  'policy_loss',
  'value_loss',
  'exploration_loss',
  'entropy',
  'kl',  # Exact KL(π‖μ), where the distribution that acted is stored.
  'approx_kl',
  'ratio_mean',
  'ratio_p05',
  'ratio_p50',
  'ratio_p95',
  'ratio_max',
  'clipped_share',
  'effective_sample_share',
  'rho_mean',
  'explained_variance',
  'advantage_std',
  'value_mean',
  'target_mean',
  'grad_norm',
  'param_norm',
  'learning_rate',
  *BUCKET_METRICS,
)
UPDATE = np.dtype([('policy', 'i8'), ('version', 'i8')] + [(name, 'f8') for name in UPDATE_METRICS])
