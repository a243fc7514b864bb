"""A model's files and weights: checkpoints, linear layers, adapters, the default model."""
