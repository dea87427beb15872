"""The model: layers of units, their coupling, and the sums over all states."""
