"""Self-supervision holds the wrong one of its two branches.

The prediction of one view should move towards the projection of the other, which is held constant. Users often ask
which of the two is held, and where. With the block on the prediction, the predictor gets no gradient and stays at its
initial values.
"""

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

SOURCES = ["lightly-ai/lightly#559", "PatrickHua/SimSiam#22", "PatrickHua/SimSiam#39", "vturrisi/solo-learn#36"]
MOVES, STAYS = ["encoder", "predictor"], []


def buggy():
    networks, view, other_view = setup()

    def loss():
        projection = networks["encoder"](other_view)
        prediction = networks["predictor"](networks["encoder"](view))
        return -cosine_similarity(prediction.detach(), projection).mean()

    return loss, networks


def fixed():
    networks, view, other_view = setup()

    def loss():
        projection = networks["encoder"](other_view)
        prediction = networks["predictor"](networks["encoder"](view))
        return -cosine_similarity(prediction, projection.detach()).mean()

    return loss, networks


def setup():
    return (
        nn.ModuleDict({"encoder": nn.Linear(4, 3), "predictor": nn.Linear(3, 3)}),
        torch.randn(8, 4),
        torch.randn(8, 4),
    )
