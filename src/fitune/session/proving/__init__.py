"""fitune doctor --prove: what this card computes and takes, held against eager code and against plans."""
