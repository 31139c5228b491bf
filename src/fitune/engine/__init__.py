"""Engines: they turn losses into new weights. And host memory, where tensors wait while others are at work."""
