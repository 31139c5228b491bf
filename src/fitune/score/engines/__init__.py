"""Engines: token ids in, tokens with log-probabilities out."""
