"""A base model and a dataset made on the spot, so that everything can be tried without a network."""
