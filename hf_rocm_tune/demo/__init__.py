"""The embedded demo: the main job on data and a model that are made on the spot, without a network."""
