"""Adversarial training: attacks, the losses at the examples they find, and exact worst cases to hold them against."""

from toolkit.adversarial.attacks._setting import EXAMPLE
from toolkit.adversarial.attacks.gradient import fgsm, mi_fgsm, pgd, rs_fgsm
from toolkit.adversarial.attacks.losses import difference_loss, margin_loss
from toolkit.adversarial.certificates.linear import certify_linear, robust_loss_linear
from toolkit.adversarial.training.losses import adversarial_loss

__all__ = [
    "EXAMPLE",
    "adversarial_loss",
    "certify_linear",
    "difference_loss",
    "fgsm",
    "margin_loss",
    "mi_fgsm",
    "pgd",
    "robust_loss_linear",
    "rs_fgsm",
]
