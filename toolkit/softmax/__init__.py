"""Softmax, its logarithm, log-sum-exp and cross entropy that neither overflow nor underflow."""

from toolkit.softmax.functions import SHIFT, cross_entropy, log_softmax, logsumexp, naive_softmax, softmax

__all__ = ["SHIFT", "cross_entropy", "log_softmax", "logsumexp", "naive_softmax", "softmax"]
