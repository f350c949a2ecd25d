"""The demo: the main job on data and a model that are created locally, without a network."""
