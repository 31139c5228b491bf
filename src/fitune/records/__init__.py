"""Measured runs, ours and those that others published, held against the estimate."""
