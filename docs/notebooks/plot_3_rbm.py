"""
Contrastive divergence: a machine that teaches its own sampler
==============================================================

Contrastive divergence raises the energy of samples that the machine draws itself. The samples are data: the block holds
them constant. A draw of 0 or 1 has no derivative, so its leak is zero. With straight-through draws, which are
differentiated as if they were probabilities, there is a leak, and learning stops.
"""

import matplotlib.pyplot as plt
import torch

from toolkit import compare, rbm, unblock
from toolkit.datasets import bars_and_stripes

images = bars_and_stripes(3, dtype=torch.float64).inputs


def machine_and_loss(chain):
    machine = rbm.RBM(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(1)
    data = images.repeat(20, 1)
    return machine, lambda: rbm.contrastive_divergence(machine, data, steps=1, chain=chain, generator=draws)


# %%
# Sampled units: the verdict is "redundant". Straight-through units: "partial".

for chain in ("sampled", "straight_through"):
    machine, loss = machine_and_loss(chain)
    print(chain, compare(loss, machine)["rbm.negative_samples"].verdict)

# %%
# Training by straight-through draws, with the block and without it, judged by the exact likelihood.


def train(*opened):
    machine, loss = machine_and_loss("straight_through")
    optimizer, likelihoods = torch.optim.SGD(machine.parameters(), lr=0.5), []
    for _ in range(800):
        with unblock(*opened):
            optimizer.zero_grad()
            loss().backward()
        optimizer.step()
        likelihoods.append(machine.log_likelihood(images).mean().item())
    return machine, likelihoods


runs = {"blocked": train(), "open": train("rbm.negative_samples")}
for name, (_, likelihoods) in runs.items():
    plt.plot(likelihoods, label=name)
plt.axhline(-torch.tensor(14.0).log(), color="grey", linestyle=":", label="best possible")
plt.xlabel("update")
plt.ylabel("log-likelihood (nats per image)")
plt.legend()
plt.show()
assert runs["blocked"][1][-1] > runs["open"][1][-1] + 0.5
