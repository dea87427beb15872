"""Finds degenerate components: those that have shrunk onto too few samples, where the likelihood has no bound.

D features, K components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.gaussian import GaussianParameters

# The least variance of the whole mixture, in units of `reg_covar`, that counts as resolved.
_RESOLVED = 100.0


@no_graph()
def collapsed_components(parameters: GaussianParameters, reg_covar: float) -> list[int]:
    """Return the components that are empty, or whose variance in some direction comes from `reg_covar` alone.

    Directions in which the whole mixture has no variance, a constant feature say, do not count; without any other
    direction all components are degenerate. After an M-step the covariance of the mixture is that of the data.

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
    weights, covariances = parameters.weights, parameters.as_type("full").covariances
    shifts = parameters.means - weights @ parameters.means
    whole = (weights[:, None, None] * covariances).sum(0) + (weights[:, None] * shifts).mT @ shifts
    values, vectors = torch.linalg.eigh(whole)
    smallest = torch.finfo(torch.float64).eps * len(values)
    resolved = values > max(_RESOLVED * reg_covar, smallest * float(values[-1]))
    empty = weights < torch.finfo(torch.float64).eps * len(weights)
    if not bool(resolved.any()):
        return list(range(len(weights)))
    directions = vectors[:, resolved]
    own = directions.mT @ covariances @ directions
    # Twice `reg_covar`: half of the variance is then the data's own.
    held_up = torch.linalg.eigvalsh(own).amin(-1) <= 2 * reg_covar
    scaled = directions / values[resolved].sqrt()
    singular = torch.linalg.eigvalsh(scaled.mT @ covariances @ scaled).amin(-1) <= smallest
    return _indices(empty | held_up | singular)


def _indices(chosen: Tensor) -> list[int]:
    return [i for i, yes in enumerate(chosen.tolist()) if yes]
