"""torch-geometric 2.8.1: losses of graph networks."""

import torch
from torch import nn
from torch_geometric.nn import (
    ARGVA,
    VGAE,
    DeepGraphInfomax,
    DMoNPooling,
    GCNConv,
    GroupAddRev,
    MemPooling,
)


def _graph():
    return torch.randn(20, 8), torch.randint(20, (2, 60))


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.scale = GCNConv(8, 4), GCNConv(8, 4)

    def forward(self, x, edges):
        return self.mean(x, edges), self.scale(x, edges)


def deep_graph_infomax():
    x, edges = _graph()
    model = DeepGraphInfomax(
        16,
        encoder=GCNConv(8, 16),
        summary=lambda z, *rest: z.mean(0).sigmoid(),
        corruption=lambda x, edges: (x[torch.randperm(20)], edges),
    )
    return lambda: model.loss(*model(x, edges)), model


def variational_autoencoder():
    x, edges = _graph()
    model = VGAE(_Encoder())
    return lambda: model.recon_loss(model.encode(x, edges), edges) + model.kl_loss() / 20, model


def _adversarial():
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return ARGVA(_Encoder(), discriminator)


def adversarial_generator():
    (x, edges), model = _graph(), _adversarial()

    def loss():
        z = model.encode(x, edges)
        return model.recon_loss(z, edges) + model.reg_loss(z) + model.kl_loss() / 20

    return loss, model


def adversarial_discriminator():
    (x, edges), model = _graph(), _adversarial()
    return lambda: model.discriminator_loss(model.encode(x, edges)), model


def memory_pooling():
    (x, _), model = _graph(), MemPooling(8, 8, 2, 4)

    def loss():
        pooled, assignment = model(x)
        return pooled.square().mean() + MemPooling.kl_loss(assignment)

    return loss, model


def modularity_pooling():
    (x, edges), model = _graph(), DMoNPooling(8, 4)
    adjacency = torch.zeros(1, 20, 20).index_put((torch.tensor(0), *edges), torch.tensor(1.0))
    return lambda: sum(part.square().mean() for part in model(x[None], adjacency)[1:]), model


def reversible():
    (x, edges), model = _graph(), GroupAddRev(GCNConv(4, 4), num_groups=2)
    return lambda: model(x.clone().requires_grad_(), edges).square().mean(), model
