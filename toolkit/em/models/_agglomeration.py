"""Starts of mixtures by agglomeration: Ward's trees of the samples, cut into K clusters.

Where clusters are far from round, the best partition depends on the metric. So there are three trees: of the raw
features, of the standardised features, and of the whitened data.

N samples, D features, K components.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._random import device_of
from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType
from toolkit.em.engine.checks import check_covariance
from toolkit.em.engine.starts import nearest, start_alike
from toolkit.em.gaussian import GaussianParameters

__all__ = ["Agglomeration"]

# The memory and time of a tree grow with the square of the number of samples.
_MOST_SAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Agglomeration:
    """Ward's trees of the samples, or of a random 2,000 of them: one tree for each of several metrics.

    Attributes:
        x: The samples, (N, D), float64.
        chosen: Indices of the samples in the trees.
        points: The centred samples in the coordinates of each metric, (N, D).
        merges: The linkage matrix of each tree, as scipy writes it.
    """

    x: Tensor
    chosen: Tensor
    points: tuple[Tensor, ...]
    merges: tuple[Tensor, ...]

    @classmethod
    @no_graph()
    def of(cls, x: Tensor, generator: torch.Generator | None) -> Agglomeration:
        """Build the trees of samples (N, D), or of a random subset if there are too many.

        Raises:
            ValueError: If the values are so large that their covariance is infinite.

        References:
            Ward, "Hierarchical grouping to optimize an objective function", 1963.
        """
        from scipy.cluster.hierarchy import ward  # only this takes it
        from scipy.spatial.distance import pdist

        x = x.to(torch.float64)
        device = device_of(generator, x)
        chosen = torch.arange(len(x), device=x.device)
        if len(x) > _MOST_SAMPLES:
            chosen = torch.randperm(len(x), generator=generator, device=device)[:_MOST_SAMPLES].to(x.device)
        centred = x - x.mean(0)
        check_covariance(centred.square().sum(0))
        metrics = _metrics(centred)
        merges = tuple(torch.from_numpy(ward(pdist(points[chosen].cpu().numpy()))) for points in metrics)
        return cls(x, chosen, metrics, merges)

    @no_graph()
    def starts(self, n_components: int, kind: CovarianceType, reg_covar: float) -> list[GaussianParameters]:
        """Return one mixture for each tree, with the means and shares of its clusters and one common covariance.

        Raises:
            ValueError: If the common covariance is singular.
        """
        from scipy.cluster.hierarchy import fcluster

        found = []
        for points, merges in zip(self.points, self.merges, strict=True):
            labels = torch.from_numpy(fcluster(merges.numpy(), n_components, "maxclust")).to(points.device).long() - 1
            # Identical samples give fewer clusters.
            if int(labels.max()) + 1 == n_components:
                labels = _of_all(points, self.chosen, labels)
                found.append(start_alike(self.x, None, labels, _means(self.x, labels), kind, reg_covar))
        return found


def _metrics(centred: Tensor) -> tuple[Tensor, ...]:
    """Return the samples (N, D) in each metric."""
    if centred.shape[1] == 1:
        return (centred,)
    deviations = centred.square().mean(0).sqrt()
    standard = centred / torch.where(deviations > 0, deviations, 1.0)
    # Directions without variance beyond rounding are left out.
    left, sizes, _ = torch.linalg.svd(standard, full_matrices=False)
    return centred, standard, left[:, sizes > 1e-8 * sizes[0]]


def _of_all(points: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    """Return the cluster of every sample (N,), by the nearest mean of the chosen samples' clusters."""
    if len(chosen) == len(points):
        return labels
    found: Tensor = nearest(points, _means(points[chosen], labels)[None])[0]
    found[chosen] = labels
    return found


def _means(points: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of each cluster (K, D)."""
    counts = labels.bincount()[:, None]
    return points.new_zeros(len(counts), points.shape[1]).index_add_(0, labels, points) / counts
