"""Population-based training: hyperparameters that evolve, selection, mutation, ratings.

Pure functions decide here and one controller acts; the package is filled when several policies
learn at once.
"""
