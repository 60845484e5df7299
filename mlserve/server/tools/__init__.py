"""Tool calls: what clients send about tools, and the calls that a model writes in its answer."""
