"""Engines: they turn losses into new weights."""
