"""Models: verified loading of weights, adapters, and where each tensor of a model came from."""
