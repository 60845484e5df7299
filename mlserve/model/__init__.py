"""The decoder: its description, weights, inputs, forward pass and sampler."""
