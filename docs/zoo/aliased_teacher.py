"""A teacher is the student itself.

The teacher should be a slow average of past students. An assignment copies no network: both names are one object, so
each step of the student is a step of the teacher too. The answers of the teacher are held constant all the same, and
the loss falls as it should, but the target moves with the student and all answers become alike.
"""

import torch
from torch import nn

SOURCES = ["facebookresearch/dinov2#407"]
MOVES, STAYS = ["student"], ["teacher"]


def buggy():
    student, view, other_view = setup()
    teacher = student
    networks = nn.ModuleDict({"teacher": teacher, "student": student})

    def loss():
        with torch.no_grad():
            target = (networks["teacher"](other_view) / 0.04).softmax(1)
        return -(target * (networks["student"](view) / 0.1).log_softmax(1)).sum(1).mean()

    return loss, networks


def fixed():
    student, view, other_view = setup()
    teacher = nn.Linear(4, 3)
    teacher.load_state_dict(student.state_dict())
    networks = nn.ModuleDict({"teacher": teacher, "student": student})

    def loss():
        with torch.no_grad():
            target = (networks["teacher"](other_view) / 0.04).softmax(1)
        return -(target * (networks["student"](view) / 0.1).log_softmax(1)).sum(1).mean()

    return loss, networks


def setup():
    return nn.Linear(4, 3), torch.randn(8, 4), torch.randn(8, 4)
