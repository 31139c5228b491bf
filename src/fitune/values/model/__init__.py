"""Models as values: shapes and traits from a config.json, and what the blocks of any architecture keep and move."""
