"""The model: layers of units, what couples them, and the sums over all states."""
