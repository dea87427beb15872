"""Adversarial training: attacks, training losses at the examples they find, and exact worst cases as a reference.

- `attacks`: gradient ascent (`fgsm`, `rs_fgsm`, `pgd`, `apgd`, `multi_target`, `linearised`), transferable examples
  (`mi_fgsm`, `ni_fgsm`, `di_fgsm`, `ti_fgsm`, `vmi_fgsm`), the nearest example (`deepfool`, `fab`, `ddn`,
  `carlini_wagner`), few changed coordinates (`jsma`, `sparsefool`, `one_pixel`), black-box attacks (`square`, `spsa`),
  and ensembles (`ensemble`, `robust_accuracy`, `robustness_curve`, `evaluate_robustness`). Every attack takes a `Ball`,
  or for short its fields, as in ``pgd(model, x, labels, epsilon=0.1, norm="l2")``. `EOT` is the mean prediction of a
  random model.
- `training`: a surrogate loss for each training method with its blocks, and `train`, which runs any method.
- `certificates`: limits that no attack can pass. Exact for linear models and small ReLU networks, bounds for larger
  ones, radii that hold with a stated confidence for any model.
- `balls`: threat models in Linf, L2 and L1 inside of a box. `networks`: models to train; `augmentation`: their images.
"""

from toolkit.adversarial.attacks._minimal import MinimalOptions
from toolkit.adversarial.attacks._setting import EXAMPLE, AttackOptions, CommonOptions, GradientOptions
from toolkit.adversarial.attacks.apgd import apgd
from toolkit.adversarial.attacks.carlini_wagner import carlini_wagner
from toolkit.adversarial.attacks.ddn import ddn
from toolkit.adversarial.attacks.deepfool import deepfool
from toolkit.adversarial.attacks.ensemble import (
    Evaluation,
    ensemble,
    evaluate_robustness,
    robust_accuracy,
    robustness_curve,
    standard_attacks,
)
from toolkit.adversarial.attacks.expectation import EOT
from toolkit.adversarial.attacks.fab import fab
from toolkit.adversarial.attacks.gradient import fgsm, pgd, rs_fgsm
from toolkit.adversarial.attacks.losses import difference_loss, dlr_loss, margin_loss
from toolkit.adversarial.attacks.multi_target import linearised, multi_target
from toolkit.adversarial.attacks.sparse import SparseOptions, jsma, one_pixel, sparsefool
from toolkit.adversarial.attacks.spsa import spsa
from toolkit.adversarial.attacks.square import square
from toolkit.adversarial.attacks.transfer import di_fgsm, mi_fgsm, ni_fgsm, ti_fgsm, vmi_fgsm
from toolkit.adversarial.augmentation import random_crop_flip
from toolkit.adversarial.balls import Ball, BallOptions
from toolkit.adversarial.certificates.bounds import (
    certify_crown,
    certify_interval,
    crown_bounds,
    interval_bounds,
    interval_loss,
)
from toolkit.adversarial.certificates.linear import certify_linear, distance_linear, robust_loss_linear
from toolkit.adversarial.certificates.relu import Verification, verify_relu
from toolkit.adversarial.certificates.smoothing import ABSTAIN, SmoothedCertificate, certify_smoothing
from toolkit.adversarial.networks import Normalize, mlp, preactivation_resnet18, small_cnn
from toolkit.adversarial.training.free import Replay, free_loss
from toolkit.adversarial.training.losses import adversarial_loss
from toolkit.adversarial.training.mart import mart_loss
from toolkit.adversarial.training.methods import (
    ALP,
    AWP,
    CURE,
    FGSM,
    LLR,
    MART,
    METHODS,
    PGD,
    RSFGSM,
    TRADES,
    VAT,
    Free,
    HeldTRADES,
    Method,
    Standard,
)
from toolkit.adversarial.training.pairing import alp_loss
from toolkit.adversarial.training.smoothness import CURVATURE_DIRECTION, cure_loss, llr_loss
from toolkit.adversarial.training.trades import CLEAN_DISTRIBUTION, held_trades_loss, trades_loss
from toolkit.adversarial.training.trainer import (
    CatastrophicOverfittingWarning,
    DivergenceError,
    History,
    TrainingOptions,
    train,
)
from toolkit.adversarial.training.vat import (
    VIRTUAL_CLEAN,
    VIRTUAL_DIRECTION,
    power_direction,
    vat_direction,
    vat_loss,
)
from toolkit.adversarial.training.weights import WEIGHT_PERTURBATION, awp_loss, weight_perturbation

__all__ = [
    "ABSTAIN",
    "ALP",
    "AWP",
    "CLEAN_DISTRIBUTION",
    "CURE",
    "CURVATURE_DIRECTION",
    "EOT",
    "EXAMPLE",
    "FGSM",
    "LLR",
    "MART",
    "METHODS",
    "PGD",
    "RSFGSM",
    "TRADES",
    "VAT",
    "VIRTUAL_CLEAN",
    "VIRTUAL_DIRECTION",
    "WEIGHT_PERTURBATION",
    "AttackOptions",
    "Ball",
    "BallOptions",
    "CatastrophicOverfittingWarning",
    "CommonOptions",
    "DivergenceError",
    "Evaluation",
    "Free",
    "GradientOptions",
    "HeldTRADES",
    "History",
    "Method",
    "MinimalOptions",
    "Normalize",
    "Replay",
    "SmoothedCertificate",
    "SparseOptions",
    "Standard",
    "TrainingOptions",
    "Verification",
    "adversarial_loss",
    "alp_loss",
    "apgd",
    "awp_loss",
    "carlini_wagner",
    "certify_crown",
    "certify_interval",
    "certify_linear",
    "certify_smoothing",
    "crown_bounds",
    "cure_loss",
    "ddn",
    "deepfool",
    "di_fgsm",
    "difference_loss",
    "distance_linear",
    "dlr_loss",
    "ensemble",
    "evaluate_robustness",
    "fab",
    "fgsm",
    "free_loss",
    "held_trades_loss",
    "interval_bounds",
    "interval_loss",
    "jsma",
    "linearised",
    "llr_loss",
    "margin_loss",
    "mart_loss",
    "mi_fgsm",
    "mlp",
    "multi_target",
    "ni_fgsm",
    "one_pixel",
    "pgd",
    "power_direction",
    "preactivation_resnet18",
    "random_crop_flip",
    "robust_accuracy",
    "robust_loss_linear",
    "robustness_curve",
    "rs_fgsm",
    "small_cnn",
    "sparsefool",
    "spsa",
    "square",
    "standard_attacks",
    "ti_fgsm",
    "trades_loss",
    "train",
    "vat_direction",
    "vat_loss",
    "verify_relu",
    "vmi_fgsm",
    "weight_perturbation",
]
