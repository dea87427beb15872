"""
Expectation maximisation: certainty instead of likelihood
=========================================================

Gradient EM holds the responsibilities constant while it moves the components. By Fisher's identity the gradient is then
that of the log-likelihood. With the block open, the surrogate is raised by making the responsibilities more certain,
and one of two overlapping components dies.
"""

import matplotlib.pyplot as plt
import torch

from toolkit import compare, datasets, em, unblock

x = datasets.two_gaussians(2000, separation=2.0, generator=torch.Generator().manual_seed(0)).inputs
start = em.start(x, 2, covariance_type="full", generator=torch.Generator().manual_seed(0))


def free_parameters():
    return {name: value.clone().requires_grad_() for name, value in em.to_unconstrained(start).items()}


# %%
# The gradients at the start. Opening the block turns the gradient by more than a right angle.

free = free_parameters()
effect = compare(lambda: -em.surrogate(em.from_unconstrained(free, "full"), x), free)["em.responsibilities"]
print(f"{effect.verdict}, leak {effect.leak:.3g}, ratio {effect.ratio:.3g}, cosine {effect.cosine:.3g}")

# %%
# The same training twice, with Adam.


def train(*opened):
    free, likelihoods = free_parameters(), []
    optimizer = torch.optim.Adam(free.values(), lr=0.05)
    for _ in range(300):
        with unblock(*opened):
            loss = -em.surrogate(em.from_unconstrained(free, "full"), x)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        likelihoods.append(em.log_likelihood(em.from_unconstrained(free, "full"), x).item())
    return em.from_unconstrained(free, "full"), likelihoods


runs = {"blocked": train(), "open": train("em.responsibilities")}

# %%
# Compare objectives, never surrogates. The open run ends at a lower likelihood, and one component has died.

figure, (curves, *maps) = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
for (name, (mixture, likelihoods)), axes in zip(runs.items(), maps, strict=True):
    curves.plot(likelihoods, label=name)
    share = em.e_step(mixture, x)[0][:, 0].detach()
    axes.scatter(*x.T, c=share, s=3, cmap="coolwarm", vmin=0, vmax=1)
    weights = mixture.log_weights.exp().tolist()
    axes.set_title(f"{name}: weights {weights[0]:.2f}, {weights[1]:.2f}")
curves.set(xlabel="step", ylabel="log-likelihood (nats per sample)")
curves.legend()
plt.show()
assert runs["blocked"][1][-1] > runs["open"][1][-1]
