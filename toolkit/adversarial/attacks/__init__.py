"""Attacks: searches for inputs near a clean one on which a model errs."""
