"""Grades of answers: graders, judges, intervals of their means, and comparisons of two scorings."""
