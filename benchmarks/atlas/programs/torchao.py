"""torchao 0.18.0: training that is aware of quantization."""

import torch
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig


def _prepared(config):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(4, 32)
    quantize_(model, config)
    return lambda: model(x).square().mean(), model


def integer_weights_and_activations():
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    return _prepared(QATConfig(weight_config=weights, activation_config=activations, step="prepare"))


def integer_weights():
    return _prepared(QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32), step="prepare"))
