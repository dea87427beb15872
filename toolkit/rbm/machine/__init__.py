"""The model: layers of units, their coupling, and sums over all states."""
