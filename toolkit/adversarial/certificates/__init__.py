"""Certificates: exact or proved worst cases, to compare attacks with."""

from toolkit.adversarial.certificates.bounds import (
    certify_crown,
    certify_interval,
    crown_bounds,
    interval_bounds,
    interval_loss,
)
from toolkit.adversarial.certificates.linear import certify_linear, distance_linear, robust_loss_linear
from toolkit.adversarial.certificates.relu import Verification, verify_relu
from toolkit.adversarial.certificates.smoothing import SmoothedCertificate, certify_smoothing

__all__ = [
    "SmoothedCertificate",
    "Verification",
    "certify_crown",
    "certify_interval",
    "certify_linear",
    "certify_smoothing",
    "crown_bounds",
    "distance_linear",
    "interval_bounds",
    "interval_loss",
    "robust_loss_linear",
    "verify_relu",
]
