"""A decoder block by formula: what its stages keep, need for a moment and compute."""
