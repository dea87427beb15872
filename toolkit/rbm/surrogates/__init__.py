"""Losses whose gradients are the learning updates, and their blocks."""
