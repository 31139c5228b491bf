"""From files to batches, with an account of what happened to every token."""
