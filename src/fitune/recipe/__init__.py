"""Files that people write: recipes with their settings, types and words, job settings, fleet files."""
