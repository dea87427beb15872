"""geomloss 0.3.1: distances between clouds of points."""

import torch
from geomloss import SamplesLoss


def _clouds(**options):
    moved, fixed = torch.randn(10, 2, requires_grad=True), torch.randn(12, 2)
    distance = SamplesLoss(backend="tensorized", **options)
    return lambda: distance(moved, fixed), {"points": moved}


def sinkhorn():
    return _clouds(loss="sinkhorn", blur=0.1)


def sinkhorn_with_bias():
    return _clouds(loss="sinkhorn", blur=0.1, debias=False)


def unbalanced_sinkhorn():
    return _clouds(loss="sinkhorn", blur=0.1, reach=0.5)


def energy():
    return _clouds(loss="energy")


def gaussian():
    return _clouds(loss="gaussian", blur=0.5)
