"""Mixtures of Gaussians: parameters and steps, fits, missing values, streams, priors, models of covariance."""
