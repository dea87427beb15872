"""A small call of every function and class of self-supervised learning that takes a number or a generator."""

import torch
from calls import Call
from torch import nn

from toolkit import self_supervised as ss


def _numbers(*shape: int) -> torch.Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float32)).reshape(shape)


VIEWS = {"student": _numbers(3, 2, 4), "teacher": _numbers(2, 2, 4)}
LOGITS = {"strong": _numbers(3, 4), "weak": _numbers(3, 4) + 1}

CALLS = {
    "self_supervised.DINOLoss": Call(ss.DINOLoss, output_dim=4),
    "self_supervised.EMATeacher": Call(ss.EMATeacher, student=nn.PReLU(), momentum=0.9),
    "self_supervised.KeyQueue": Call(ss.KeyQueue, size=5, n_features=3),
    "self_supervised.data2vec_loss": Call(ss.data2vec_loss, prediction=_numbers(2, 4), layers=VIEWS["teacher"]),
    "self_supervised.dino_center": Call(ss.dino_center, center=_numbers(4), teacher=VIEWS["teacher"]),
    "self_supervised.dino_loss": Call(ss.dino_loss, **VIEWS, center=_numbers(4)),
    "self_supervised.ema": Call(ss.ema, teacher={"w": _numbers(2)}, student={"w": _numbers(2) + 1}, momentum=0.9),
    "self_supervised.fixmatch_loss": Call(ss.fixmatch_loss, **LOGITS),
    "self_supervised.moco_loss": Call(ss.moco_loss, q=_numbers(2, 3), k=_numbers(2, 3), queue=_numbers(4, 3)),
    "self_supervised.sinkhorn": Call(ss.sinkhorn, scores=_numbers(3, 4)),
    "self_supervised.soft_label_loss": Call(ss.soft_label_loss, **LOGITS),
    "self_supervised.swav_loss": Call(ss.swav_loss, scores=VIEWS["student"]),
}
