"""brevitas 0.13.4: networks with quantized weights and activations."""

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8ActPerTensorFloat, SignedBinaryWeightPerTensorConst
from torch import nn


def _trained(*layers):
    model, x = nn.Sequential(*layers).train(), torch.randn(16, 8)
    return lambda: model(x).square().mean(), model


def linear():
    layers = (qnn.QuantLinear(8, 8, bias=True, weight_bit_width=4), qnn.QuantReLU(bit_width=4))
    return _trained(*layers, qnn.QuantLinear(8, 1, bias=True, weight_bit_width=4))


def binary_weights():
    return _trained(qnn.QuantLinear(8, 1, bias=True, weight_quant=SignedBinaryWeightPerTensorConst))


def quantized_inputs():
    return _trained(qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat), qnn.QuantLinear(8, 1, bias=True))
