"""Training: the mixin with all seams, checkpoints, callbacks and the report of a run."""
