"""Measured bytes, seconds and hardware."""
