"""Finds degenerate components, which have shrunk onto too few samples, so that their likelihood has no bound.

D features, K components.
"""

from __future__ import annotations

import numpy as np
import torch

from toolkit.blocks import no_graph
from toolkit.em.covariance.matrices import are_definite
from toolkit.em.covariance.structure import as_arrays, library
from toolkit.em.gaussian import GaussianParameters

# The least variance of the whole mixture, in units of `reg_covar`, that counts as resolved.
_RESOLVED = 100.0


@no_graph()
@np.errstate(all="ignore")
def collapsed_components(parameters: GaussianParameters, reg_covar: float) -> list[int]:
    """Return the components that are empty, or whose variance in some direction comes from `reg_covar` alone.

    Directions in which the whole mixture has no variance, such as a constant feature, do not count. If there is no
    other direction, all components are degenerate. After an M-step the covariance of the mixture is that of the data.

    Args:
        parameters: A fitted mixture.
        reg_covar: The number that was added to every variance.

    Returns:
        Their indices, in order.

    Example:
        >>> two = GaussianParameters.from_covariances(
        ...     weights=torch.tensor([0.9, 0.1]), means=torch.tensor([[0.0], [3.0]]),
        ...     covariances=torch.tensor([4.0, 1e-6]), covariance_type="spherical")
        >>> collapsed_components(two, 1e-6)
        [1]
    """
    parameters = parameters.to(torch.float64)
    full = parameters.as_type("full").covariances
    weights, means, covariances = as_arrays(full.numel(), parameters.weights, parameters.means, full)
    of = library(weights)
    shifts = means - weights @ means
    whole = (weights[:, None, None] * covariances).sum(0) + (weights[:, None] * shifts).mT @ shifts
    smallest = of.finfo(whole.dtype).eps * len(whole)
    empty = weights < of.finfo(whole.dtype).eps * len(weights)
    if of is np and not empty.any() and whole.trace() > len(whole) * _RESOLVED * reg_covar:
        # Enough, and faster: each covariance is larger than both bounds below in every direction.
        above = covariances - 2 * reg_covar * np.eye(len(whole)) - smallest * whole
        if are_definite(above):
            return []
    values, vectors = of.linalg.eigh(whole)
    resolved = values > max(_RESOLVED * reg_covar, smallest * float(values[-1]))
    if not bool(resolved.any()):
        return list(range(len(weights)))
    directions = vectors[:, resolved]
    own = directions.mT @ covariances @ directions
    # Twice `reg_covar`: half of the variance is then the data's own.
    held_up = of.linalg.eigvalsh(own)[..., 0] <= 2 * reg_covar
    scaled = directions / of.sqrt(values[resolved])
    singular = of.linalg.eigvalsh(scaled.mT @ covariances @ scaled)[..., 0] <= smallest
    return [k for k, yes in enumerate((empty | held_up | singular).tolist()) if yes]
