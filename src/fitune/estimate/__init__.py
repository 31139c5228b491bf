"""Bytes and seconds predicted by arithmetic alone: one function is one term."""
