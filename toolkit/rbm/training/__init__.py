"""Training without autograd: the engine that takes the steps, and the loop around it."""
