"""Curvature: surrogates whose blocks decide on the Hessian, or on the length of the gradient.

- `divergences`: divergences from a held point. Their Hessian is the Gauss-Newton or Fisher matrix, exactly.
- `products`: Hessian-vector products, and the natural gradient by conjugate gradients.
- `majorisation`: robust losses, their reweighted squares (IRLS) and half-quadratic majorisers; proximal terms.
- `scaling`: a scaled gradient.
"""

from toolkit.curvature.divergences import (
    HELD_OUTPUTS,
    HELD_POLICY,
    LINEAR_PART,
    gauss_newton_loss,
    gaussian_kl_from_held,
    held_divergence,
    kl_from_held,
    kl_to_held,
)
from toolkit.curvature.majorisation import (
    ANCHOR,
    MAJORISER,
    WEIGHTS,
    half_quadratic_loss,
    proximal_penalty,
    reweighted_loss,
    robust_loss,
    robust_weights,
)
from toolkit.curvature.products import hessian_product, natural_gradient
from toolkit.curvature.scaling import PARTIAL, scale_gradient

__all__ = [
    "ANCHOR",
    "HELD_OUTPUTS",
    "HELD_POLICY",
    "LINEAR_PART",
    "MAJORISER",
    "PARTIAL",
    "WEIGHTS",
    "gauss_newton_loss",
    "gaussian_kl_from_held",
    "half_quadratic_loss",
    "held_divergence",
    "hessian_product",
    "kl_from_held",
    "kl_to_held",
    "natural_gradient",
    "proximal_penalty",
    "reweighted_loss",
    "robust_loss",
    "robust_weights",
    "scale_gradient",
]
