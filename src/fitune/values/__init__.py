"""Frozen values that flow through the program. No torch here."""
