"""pytorch-tabnet 4.1.0: networks for tables."""

import torch
from pytorch_tabnet.metrics import UnsupervisedLoss
from pytorch_tabnet.tab_network import TabNet, TabNetPretraining
from torch import nn


def classifier():
    model = TabNet(6, 3, n_d=4, n_a=4, group_attention_matrix=torch.eye(6)).train()
    x, labels = torch.randn(16, 6), torch.randint(3, (16,))

    def loss():
        logits, sparsity = model(x)
        return nn.functional.cross_entropy(logits, labels) - 1e-3 * sparsity

    return loss, model


def pretraining():
    model = TabNetPretraining(6, n_d=4, n_a=4, group_attention_matrix=torch.eye(6)).train()
    x = torch.randn(16, 6)
    return lambda: UnsupervisedLoss(*model(x)), model
