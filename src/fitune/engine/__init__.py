"""How a loss becomes new weights."""
