"""Survival: files that are whole or not there, manifests, saved state, whose directory it is, and the heartbeat."""
