"""Losses whose gradients are the updates of learning, with their blocks."""
