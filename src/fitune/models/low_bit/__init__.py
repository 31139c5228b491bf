"""Weights of few bits: packed in memory (NF4, HQQ), on their way from disk, and in files."""
