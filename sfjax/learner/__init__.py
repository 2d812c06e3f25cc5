"""The learner: batches of trajectories in, new versions of the parameters out."""
