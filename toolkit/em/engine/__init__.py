"""The engine of EM: samples in the coordinates of the pass, one pass for a step, many starts at once, acceleration."""
