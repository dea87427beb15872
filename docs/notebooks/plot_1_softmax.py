"""
Softmax: a log-sum-exp that is blocked by half
==============================================

A stable log-sum-exp uses the maximum twice: it is subtracted inside and added back outside. The two uses cancel, so
either both may carry a gradient or neither. Blocking only one of them leaves the loss right to the last digit, and the
gradient wrong.
"""

import matplotlib.pyplot as plt
import torch

from toolkit import compare, stop_gradient, unblock


def logsumexp(logits):
    inner = stop_gradient(logits.amax(1, keepdim=True), "inner")
    outer = stop_gradient(logits.amax(1), "outer")
    return (logits - inner).exp().sum(1).log() + outer


# %%
# Softmax regression: 500 samples of 4 features, whose labels are drawn from a known model.

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(500, 4, generator=generator)
truth = torch.randn(4, 5, generator=generator)
labels = torch.multinomial((inputs @ truth).softmax(1), 1, generator=generator).squeeze(1)


def cross_entropy(weight):
    logits = inputs @ weight
    return (logsumexp(logits) - logits.gather(1, labels[:, None]).squeeze(1)).mean()


# %%
# `compare` runs the loss once, and returns the gradient for each block opened. The verdict on each block alone is
# "partial": there is a leak.

start = torch.zeros(4, 5, requires_grad=True)
comparison = compare(lambda: cross_entropy(start + 0.1 * truth), {"weight": start})
print(comparison)

# %%
# With both open, the gradient is the blocked one again, up to rounding.

both = comparison.gradient(["inner", "outer"])["weight"]
torch.testing.assert_close(both, comparison.blocked["weight"])

# %%
# Training with each set of open blocks:


def train(*opened):
    weight, losses = torch.zeros(4, 5, requires_grad=True), []
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(100):
        with unblock(*opened):
            loss = cross_entropy(weight)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


runs = {opened: train(*opened) for opened in [(), ("inner",), ("outer",), ("inner", "outer")]}
assert runs["inner",][-1] > runs[()][-1] + 0.1
assert abs(runs["inner", "outer"][-1] - runs[()][-1]) < 1e-4

for opened, losses in runs.items():
    plt.plot(losses, label=" and ".join(opened) + " open" if opened else "blocked", linestyle="--" if opened else "-")
plt.xlabel("step")
plt.ylabel("cross entropy (nats per sample)")
plt.ylim(0.5, 4)
plt.legend()
plt.show()
