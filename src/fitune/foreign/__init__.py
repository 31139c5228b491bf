"""Recipes of other trainers: each key becomes a setting here, is passed over, or is refused by name."""
