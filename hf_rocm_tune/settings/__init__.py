"""Settings: flags, defaults that differ from TRL's, recipes."""
