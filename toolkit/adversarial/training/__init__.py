"""Adversarial training: the surrogates that make a model robust, and the loop that descends them."""
