"""The story of a run, from its settings to what it leaves on disk."""
