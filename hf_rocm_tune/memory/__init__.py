"""Memory of a training step: planned by arithmetic before it runs."""
