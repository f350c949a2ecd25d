"""Training: the mixin with all seams, checkpoints, run identity, callbacks and the report of a run."""
