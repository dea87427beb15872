"""lightly 1.6.0: self-supervised losses on small convolutional networks."""

import copy

import torch
from lightly.loss import (
    BarlowTwinsLoss,
    DCLLoss,
    DINOLoss,
    IBOTPatchLoss,
    KoLeoLoss,
    MSNLoss,
    NegativeCosineSimilarity,
    NTXentLoss,
    SwaVLoss,
    TiCoLoss,
    VICRegLoss,
)
from lightly.models.modules import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    DINOProjectionHead,
    MoCoProjectionHead,
    NNMemoryBankModule,
    SwaVPrototypes,
)
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import nn


def _views():
    return torch.randn(8, 3, 8, 8), torch.randn(8, 3, 8, 8)


def _backbone():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers)


def _average(network):
    average = copy.deepcopy(network)
    deactivate_requires_grad(average)
    return average


def _of_two_views(criterion):
    network, (first, second) = _backbone(), _views()
    return lambda: criterion(network(first), network(second)), network


def byol():
    network = nn.Sequential(_backbone(), BYOLProjectionHead(8, 16, 8))
    average, predictor, (first, second) = _average(network), BYOLPredictionHead(8, 16, 8), _views()
    criterion = NegativeCosineSimilarity()

    def loss():
        update_momentum(network, average, m=0.99)
        pairs = ((first, second), (second, first))
        return 0.5 * sum(criterion(predictor(network(one)), average(other)) for one, other in pairs)

    return loss, nn.ModuleDict({"network": network, "predictor": predictor})


def dino():
    student = nn.Sequential(_backbone(), DINOProjectionHead(8, 16, 8, 32, freeze_last_layer=1))
    teacher = nn.Sequential(_backbone(), DINOProjectionHead(8, 16, 8, 32))
    teacher.load_state_dict(student.state_dict())
    deactivate_requires_grad(teacher)
    criterion, views = DINOLoss(output_dim=32, warmup_teacher_temp_epochs=5), _views()

    def loss():
        update_momentum(student, teacher, m=0.99)
        return criterion([teacher(view) for view in views], [student(view) for view in views], epoch=0)

    return loss, student


def dino_with_one_network():
    network = nn.Sequential(_backbone(), DINOProjectionHead(8, 16, 8, 32))
    criterion, views = DINOLoss(output_dim=32, warmup_teacher_temp_epochs=5), _views()

    def loss():
        outputs = [network(view) for view in views]
        return criterion(outputs, outputs, epoch=0)

    return loss, network


def moco():
    network, (first, second) = nn.Sequential(_backbone(), MoCoProjectionHead(8, 16, 8)), _views()
    average, criterion = _average(network), NTXentLoss(memory_bank_size=(32, 8))
    return lambda: criterion(network(first), average(second)), network


def moco_with_one_network():
    return _of_two_views(NTXentLoss(memory_bank_size=(32, 8)))


def nnclr():
    network, (first, second) = _backbone(), _views()
    memory, criterion = NNMemoryBankModule(size=(32, 8)), NTXentLoss()
    return lambda: criterion(memory(network(first), update=True), network(second)), network


def swav():
    network, prototypes, views = _backbone(), SwaVPrototypes(8, 16), _views()
    criterion = SwaVLoss()

    def loss():
        prototypes.normalize()
        codes = [prototypes(nn.functional.normalize(network(view), dim=1)) for view in views]
        return criterion(codes, [0.9 * codes[0]])

    return loss, nn.ModuleDict({"network": network, "prototypes": prototypes})


def masked_siamese():
    network, (first, second) = _backbone(), _views()
    prototypes, criterion = nn.Linear(8, 16, bias=False), MSNLoss()

    def loss():
        return criterion(network(first), network(second), prototypes.weight)

    return loss, nn.ModuleDict({"network": network, "prototypes": prototypes})


def ibot():
    student, x, mask = nn.Linear(8, 16), torch.randn(2, 4, 4, 8), torch.rand(2, 4, 4) > 0.5
    teacher, criterion = _average(student), IBOTPatchLoss(output_dim=16)
    return lambda: criterion(teacher(x)[mask], student(x)[mask], mask=mask), student


def ibot_with_one_network():
    network, x, mask = nn.Linear(8, 16), torch.randn(2, 4, 4, 8), torch.rand(2, 4, 4) > 0.5
    criterion = IBOTPatchLoss(output_dim=16)
    return lambda: criterion(network(x)[mask], network(x)[mask], mask=mask), network


def vicreg():
    return _of_two_views(VICRegLoss())


def barlow_twins():
    return _of_two_views(BarlowTwinsLoss())


def decoupled_contrastive():
    return _of_two_views(DCLLoss())


def transformation_invariance():
    return _of_two_views(TiCoLoss())


def kozachenko_leonenko():
    network, (view, _) = _backbone(), _views()
    criterion = KoLeoLoss()
    return lambda: criterion(network(view)), network
