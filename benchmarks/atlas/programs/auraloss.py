"""auraloss 0.4.0: losses of sound."""

import auraloss
import torch
from torch import nn


def _filtered(criterion, channels=1):
    layer, sound = nn.Conv1d(channels, channels, 9, padding=4), torch.randn(2, channels, 4096)
    target = torch.randn(2, channels, 4096)
    return lambda: criterion(layer(sound), target), layer


def multi_resolution():
    return _filtered(auraloss.freq.MultiResolutionSTFTLoss())


def random_resolution():
    return _filtered(auraloss.freq.RandomResolutionSTFTLoss(max_fft_size=2048))


def sums_and_differences():
    return _filtered(auraloss.freq.SumAndDifferenceSTFTLoss([512], [128], [256]), channels=2)


def signal_to_distortion():
    return _filtered(auraloss.time.SISDRLoss())


def log_cosh():
    return _filtered(auraloss.time.LogCoshLoss())
