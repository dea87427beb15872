"""The losses of public packages, one file for each.

A file has the name of its package in the package index, with ``_`` for ``-``; its header
names the version. Its public functions build a loss each: they return a function without arguments, which returns the
loss, and the parameters. All numbers come from torch's global generator, seeded before each.
"""
