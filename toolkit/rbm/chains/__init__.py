"""Markov chains whose draws are negative samples."""
