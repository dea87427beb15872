"""Experiments of this project, one module each."""
