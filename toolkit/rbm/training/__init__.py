"""Training without autograd: the trainer of single steps, and the loop around it."""
