"""Experiments: each runs one algorithm with its blocks in place and with them open."""
