"""The one place where prediction and measurement meet."""
