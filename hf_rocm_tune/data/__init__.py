"""Rows on their way to the trainer: where they come from, whether they fit, and the loader that verifies batches."""
