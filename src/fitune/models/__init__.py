"""An ordinary transformers model, changed by small functions in one visible order."""
