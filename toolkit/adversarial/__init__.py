"""Adversarial training: attacks, the loss at the examples they find, and exact worst cases to hold them against."""

from toolkit.adversarial.attacks import EXAMPLE, fgsm, margin_loss, pgd
from toolkit.adversarial.linear import certify_linear, robust_loss_linear
from toolkit.adversarial.training import adversarial_loss

__all__ = ["EXAMPLE", "adversarial_loss", "certify_linear", "fgsm", "margin_loss", "pgd", "robust_loss_linear"]
