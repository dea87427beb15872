"""open-clip-torch 3.3.0: contrastive losses of images and texts."""

import open_clip
import torch
from open_clip.loss import ClipLoss, DistillClipLoss, SigLipLoss
from torch import nn


def _model(**options):
    vision = {"image_size": 16, "layers": 1, "width": 16, "patch_size": 8, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1}
    return open_clip.CLIP(16, vision, text, **options)


def _pairs():
    return torch.randn(4, 3, 16, 16), torch.randint(32, (4, 8))


def contrastive():
    model, pairs, criterion = _model(), _pairs(), ClipLoss()
    return lambda: criterion(*model(*pairs)), model


def sigmoid():
    model, pairs, criterion = _model(init_logit_bias=-10.0), _pairs(), SigLipLoss()
    return lambda: criterion(*model(*pairs)), model


def distillation():
    student, teacher, pairs, criterion = _model(), _model(), _pairs(), DistillClipLoss()

    def loss():
        return sum(criterion(*student(*pairs), *teacher(*pairs)))

    return loss, nn.ModuleDict({"student": student, "teacher": teacher})
