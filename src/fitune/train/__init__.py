"""Executes a Plan and decides nothing."""
