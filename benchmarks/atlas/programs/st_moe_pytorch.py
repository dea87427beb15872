"""st-moe-pytorch 0.1.8: a mixture of experts with its balance losses."""

import torch
from st_moe_pytorch import MoE


def mixture():
    model, x = MoE(dim=8, num_experts=4, gating_top_n=2).train(), torch.randn(2, 16, 8)

    def loss():
        output, auxiliary, _, _ = model(x)
        return output.square().mean() + auxiliary

    return loss, model
