"""
Adversarial training: when the block pays
=========================================

Adversarial training descends the loss at the worst input in a ball, and holds that input constant. By Danskin's theorem
the path through the input contributes nothing, once the attack has found the maximum. Before that, in L2, it leaks: the
gradient then also follows the changes of the attack's own steps.
"""

import matplotlib.pyplot as plt
import torch

from toolkit import adversarial, compare, datasets

data = datasets.digits()
inputs, labels = data.inputs[:100].float(), data.labels[:100]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Softplus(), torch.nn.Linear(32, 10))

# %%
# A few epochs of ordinary training, so that there is something to attack.

optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


# %%
# The target is the gradient at the worst input, which is found by a long attack. How far from it is the gradient of a
# short attack, with the block and without it?


def comparison(steps):
    def loss():
        attacked = adversarial.pgd(model, inputs, labels, epsilon=0.5, norm="l2", steps=steps)
        return torch.nn.functional.cross_entropy(model(attacked), labels)

    return compare(loss, model)


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


target = flat(comparison(100).blocked)
counts, errors = [1, 2, 5, 10, 20, 40], {"blocked": [], "open": []}
for steps in counts:
    found = comparison(steps)
    for name, opened in (("blocked", []), ("open", ["adversarial.example"])):
        errors[name].append(((flat(found.gradient(opened)) - target).norm() / target.norm()).item())

for name, values in errors.items():
    plt.loglog(counts, values, "o-", label=name)
plt.xlabel("steps of the attack")
plt.ylabel("distance from the target, relative")
plt.legend()
plt.show()
assert errors["blocked"][-1] < errors["open"][-1]

# %%
# The images before and after the attack.

attacked = adversarial.pgd(model, inputs, labels, epsilon=0.5, norm="l2", steps=50)
figure, axes = plt.subplots(2, 8, figsize=(8, 2.2), layout="constrained")
for column in range(8):
    for row, images in zip(axes, (inputs, attacked), strict=True):
        row[column].imshow(images[column].reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        row[column].set_axis_off()
        row[column].set_title(int(model(images[column]).argmax()), fontsize=9)
plt.show()
