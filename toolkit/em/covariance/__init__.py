"""The structures of covariances, one class each. All formulas that depend on the structure are here.

A new structure is a file here with its class, and its name in the list below.
"""

from __future__ import annotations

from typing import get_args

from toolkit._checks import choice
from toolkit.em.covariance.axes import DIAG, SPHERICAL
from toolkit.em.covariance.matrices import FULL, TIED
from toolkit.em.covariance.structure import CovarianceType, Quadratics, Structure, soft_counts

__all__ = [
    "COVARIANCE_TYPES",
    "DIAG",
    "FULL",
    "SPHERICAL",
    "TIED",
    "CovarianceType",
    "Quadratics",
    "Structure",
    "soft_counts",
    "structure_of",
]

_STRUCTURES: dict[str, Structure] = {structure.name: structure for structure in (FULL, TIED, DIAG, SPHERICAL)}

COVARIANCE_TYPES: tuple[CovarianceType, ...] = get_args(CovarianceType)


def structure_of(covariance_type: str) -> Structure:
    """Return the structure of this name.

    Raises:
        ValueError: If no structure has this name.
    """
    choice("covariance_type", covariance_type, _STRUCTURES)
    return _STRUCTURES[covariance_type]
