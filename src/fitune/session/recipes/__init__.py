"""Ways for a recipe to come in: from options, from Python's keywords, from another trainer, from five questions."""
