"""Answers and grades for a whole dataset."""
