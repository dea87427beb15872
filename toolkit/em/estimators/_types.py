"""The names of covariances: scikit-learn's four types, mclust's fourteen models, and conversions of mixtures.

D features, K components.
"""

from __future__ import annotations

from typing import cast

import torch

from toolkit.em.covariance import COVARIANCE_TYPES, CovarianceType, models
from toolkit.em.covariance.models import CovarianceModel
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models.parsimonious import ParsimoniousParameters

# The models that are scikit-learn's types under another name.
_TYPES: dict[CovarianceModel, CovarianceType] = {"VVV": "full", "EEE": "tied", "VVI": "diag", "VII": "spherical"}


def gaussian_type(covariance: CovarianceType | CovarianceModel) -> CovarianceType | None:
    """Return the type if it is one of scikit-learn's four, None for a model."""
    return covariance if covariance in COVARIANCE_TYPES else None


def engine_type(covariance: CovarianceType | CovarianceModel) -> CovarianceType | None:
    """Return the type that is equal to a model, or None."""
    return gaussian_type(covariance) or _TYPES.get(cast(CovarianceModel, covariance))


def start_type(covariance: CovarianceType | CovarianceModel) -> CovarianceType:
    """Return the type of mixture that a fit starts from."""
    return engine_type(covariance) or models.model_of(covariance).structure.wide.name


def model_of(covariance: CovarianceType | CovarianceModel) -> CovarianceModel:
    """Return the model that is equal to a type, or the model itself."""
    names = {kind: model for model, kind in _TYPES.items()}
    return names.get(cast(CovarianceType, covariance)) or cast(CovarianceModel, covariance)


def as_gaussian(parameters: GaussianParameters | ParsimoniousParameters) -> GaussianParameters:
    """Return any Gaussian mixture as `GaussianParameters`, float64."""
    return (parameters if isinstance(parameters, GaussianParameters) else parameters.to_gaussian()).to(torch.float64)
