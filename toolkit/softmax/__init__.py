"""Softmax, its logarithm, log-sum-exp and cross entropy that neither overflow nor underflow."""

from toolkit.softmax.functions import SHIFT, cross_entropy, log_softmax, logsumexp, naive_softmax, softmax
from toolkit.softmax.linear import linear_cross_entropy

__all__ = ["SHIFT", "cross_entropy", "linear_cross_entropy", "log_softmax", "logsumexp", "naive_softmax", "softmax"]
