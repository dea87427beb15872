"""pytorch-metric-learning 2.9.0: losses of embeddings with labels."""

import torch
from pytorch_metric_learning import losses, miners, regularizers
from torch import nn

_CLASSES = {"num_classes": 4, "embedding_size": 8}


def _embedded(criterion, miner=None):
    net, x, labels = nn.Linear(8, 8), torch.randn(16, 8), torch.arange(16) % 4

    def loss():
        embeddings = net(x)
        return criterion(embeddings, labels, miner(embeddings, labels) if miner else None)

    return loss, nn.ModuleDict({"net": net, "criterion": criterion})


def angular():
    return _embedded(losses.AngularLoss())


def arc_face():
    return _embedded(losses.ArcFaceLoss(**_CLASSES))


def circle():
    return _embedded(losses.CircleLoss())


def cosine_face():
    return _embedded(losses.CosFaceLoss(**_CLASSES))


def cross_batch_memory():
    return _embedded(losses.CrossBatchMemory(losses.NTXentLoss(), 8, 32))


def dynamic_soft_margin():
    return _embedded(losses.DynamicSoftMarginLoss())


def fast_ap():
    return _embedded(losses.FastAPLoss())


def histogram():
    return _embedded(losses.HistogramLoss(n_bins=10))


def large_margin_softmax():
    return _embedded(losses.LargeMarginSoftmaxLoss(**_CLASSES))


def lifted_structure():
    return _embedded(losses.GeneralizedLiftedStructureLoss())


def multi_similarity():
    return _embedded(losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner())


def normalized_temperature():
    return _embedded(losses.NTXentLoss())


def p2s_gradient():
    return _embedded(losses.P2SGradLoss(descriptors_dim=8, num_classes=4))


def proxy_anchor():
    return _embedded(losses.ProxyAnchorLoss(**_CLASSES))


def ranked_list():
    return _embedded(losses.RankedListLoss(margin=1, Tn=1))


def smooth_ap():
    return _embedded(losses.SmoothAPLoss())


def soft_triple():
    return _embedded(losses.SoftTripleLoss(**_CLASSES))


def sphere_face():
    return _embedded(losses.SphereFaceLoss(**_CLASSES))


def supervised_contrastive():
    return _embedded(losses.SupConLoss())


def threshold_consistent_margin():
    return _embedded(losses.ThresholdConsistentMarginLoss())


def triplet_with_hard_pairs():
    return _embedded(losses.TripletMarginLoss(), miners.BatchHardMiner())


def tuplet_margin():
    return _embedded(losses.TupletMarginLoss())


def regular_face():
    criterion = losses.ArcFaceLoss(**_CLASSES, weight_regularizer=regularizers.RegularFaceRegularizer())
    return _embedded(criterion)
