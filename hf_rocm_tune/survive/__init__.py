"""Survival: files that are whole or not there, manifests, saved state, saved adapters, and whose directory it is."""
