"""Live peers: JAX and TensorFlow find the same gradients with their own `stop_gradient`, for every block.

They are in the dependency group ``peers``; without them only what needs no peer is tested.
"""

import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np
import peer_programs
import pytest
import torch
from contract import block_cases, peer_cases
from each import each
from folders import TESTS
from torch import Tensor, nn
from values import draw

import toolkit
from toolkit import Block, block, declared_blocks, stop_gradient, unblock
from toolkit.adversarial import pgd
from toolkit.adversarial.training.smoothness import cure_loss
from toolkit.adversarial.training.trades import held_trades_loss
from toolkit.adversarial.training.vat import vat_loss
from toolkit.adversarial.training.weights import awp_loss
from toolkit.em.mixture import surrogate
from toolkit.rbm.bias import exact_divergence
from toolkit.rbm.chains.gibbs import gibbs
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Bernoulli
from toolkit.rbm.surrogates.centering import centered, centering_offsets
from toolkit.rbm.surrogates.divergence import (
    contrastive_divergence,
    energy_difference,
    expected_energy,
    persistent_contrastive_divergence,
)
from toolkit.rbm.surrogates.fast_weights import updated_fast_weights
from toolkit.softmax import cross_entropy, linear_cross_entropy, log_softmax, logsumexp, softmax

Tensors = Mapping[str, Tensor]

LEAKY = declared_blocks().get("test_peers.shift") or block(
    "test_peers.shift", "A shift that no division undoes: opening it leaks, which the peers have to find as well."
)


def one_hot(labels: Tensor, n_classes: int) -> Tensor:
    return nn.functional.one_hot(labels, n_classes).double()


def network(p: Tensors) -> Callable[[Tensor], Tensor]:
    return lambda x: (x @ p["first"].T).tanh() @ p["second"].T


class Network(nn.Module):
    def __init__(self, p: Tensors) -> None:
        super().__init__()
        for name, value in p.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return network(dict(self.named_parameters()))(x)


class TwoGaussians:
    """A mixture with diagonal precisions, as a function of its parameters."""

    def __init__(self, p: Tensors) -> None:
        self.p = p

    def log_joint(self, x: Tensor) -> Tensor:
        scaled = self.p["log_precisions"].exp() * (x[:, None] - self.p["means"]).square()
        log_density = 0.5 * (self.p["log_precisions"] - scaled).sum(-1)
        return self.p["logits"].log_softmax(-1) + log_density


def machine(p: Tensors) -> Joint:
    return Joint(p["weights"], Bernoulli(p["visible_bias"]), Bernoulli(p["hidden_bias"]))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def draws(p: Tensors, start: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return what the chains of `machine` draw, step by step, from `generator`."""
    joint, source, visible, found = machine(p), generator(), start, {}
    for name in names:
        found[f"{name}_hidden"] = joint.hidden.sample(joint.to_hidden(visible), source)
        found[f"{name}_visible"] = visible = joint.visible.sample(joint.to_visible(found[f"{name}_hidden"]), source)
    return found


X, LABELS = draw(1, 4, 5), torch.tensor([2, 0, 4, 1])
RBM = {"weights": draw(2, 4, 3), "visible_bias": draw(3, 4), "hidden_bias": draw(4, 3)}
DATA, STARTS = (draw(5, 6, 4) > 0).double(), (draw(6, 6, 4) > 0).double()
NETWORK = {"first": draw(7, 6, 3), "second": draw(8, 3, 6)}
BINARY = {"first": draw(7, 6, 3), "second": draw(9, 2, 6)}
POINTS, CLASSES = draw(10, 5, 3), torch.tensor([0, 2, 1, 1, 0])
BITS = {n: torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * n) for n in (3, 4)}
START = draw(11, 16).softmax(0)


def softmaxes(p: Tensors, c: Tensors) -> Tensor:
    value = (c["of_softmax"] * softmax(p["x"])).sum() + (c["of_log_softmax"] * log_softmax(p["x"])).sum()
    value = value + (c["of_logsumexp"] * logsumexp(p["x"], keepdim=True)).sum()
    return value + cross_entropy(p["x"], LABELS, reduction="sum")


def fast_weights(p: Tensors, c: Tensors) -> Tensor:
    fast = {"weights": p["fast"]}
    for name in ("first", "second"):
        fast = updated_fast_weights(fast, {"weights": p["weights"] * c[name]}, learning_rate=0.3, decay=0.8)
    return (fast["weights"].square() * c["first"]).sum() + (fast["weights"] * p["weights"]).sum()


def two_updates(p: Tensors, c: Tensors) -> Tensor:
    chains, source, value = c["start"], generator(), torch.tensor(0.0).double()
    for _ in range(2):
        loss, chains = persistent_contrastive_divergence(
            machine(p), c["data"], chains, steps=1, chain="straight_through", generator=source
        )
        value = value + loss
    return value + machine(p).free_energy(chains).mean()


def example(p: Tensors, c: Tensors) -> Tensor:
    moved = pgd(network(p), c["x"], CLASSES, epsilon=1.0, norm="l2", steps=3, step_size=0.2, bounds=None)
    return nn.functional.cross_entropy(network(p)(moved), CLASSES)


def perturbed(p: Tensors, c: Tensors) -> Tensor:
    assert isinstance(p, Leaves)
    return awp_loss(p.module, lambda model: nn.functional.cross_entropy(model(c["x"]), CLASSES), gamma=0.1)


class Leaves(dict[str, Tensor]):
    """Parameters to differentiate by, and a network that has them."""

    def __init__(self, values: Tensors) -> None:
        self.module = Network(values)
        super().__init__(self.module.named_parameters())


likelier = network(BINARY)(POINTS).argmax(1)
OURS: dict[str, tuple[Tensors, Tensors, Callable[[Tensors, Tensors], Tensor]]] = {
    **peer_cases(),
    "softmax": (
        {"x": X},
        {
            "of_softmax": draw(12, 4, 5),
            "of_log_softmax": draw(13, 4, 5),
            "of_logsumexp": draw(14, 4, 1),
            "one_hot": one_hot(LABELS, 5),
        },
        softmaxes,
    ),
    "linear_cross_entropy": (
        {"input": X, "weight": draw(15, 7, 5), "bias": draw(16, 7)},
        {"one_hot": one_hot(LABELS, 7)},
        lambda p, c: linear_cross_entropy(p["input"], p["weight"], LABELS, bias=p["bias"], chunk_size=3),
    ),
    "undivided_softmax": (
        {"x": X},
        {"of_softmax": draw(12, 4, 5)},
        lambda p, c: (c["of_softmax"] * (p["x"] - stop_gradient(p["x"].amax(-1, keepdim=True), LEAKY)).exp()).sum(),
    ),
    "em_surrogate": (
        {"logits": draw(17, 2), "means": draw(18, 2, 5), "log_precisions": 0.3 * draw(19, 2, 5)},
        {"x": X},
        lambda p, c: surrogate(TwoGaussians(p), c["x"]),
    ),
    "contrastive_divergence": (
        RBM,
        {"data": DATA, **draws(RBM, DATA, ("first",))},
        lambda p, c: contrastive_divergence(
            machine(p), c["data"], steps=1, chain="straight_through", generator=generator()
        ),
    ),
    "persistent_contrastive_divergence": (
        RBM,
        {"data": DATA, "start": STARTS, **draws(RBM, STARTS, ("first", "second"))},
        two_updates,
    ),
    "end_of_a_chain": (
        RBM,
        {"data": DATA, **draws(RBM, DATA, ("first",))},
        lambda p, c: (
            machine(p)
            .free_energy(gibbs(machine(p), c["data"], steps=1, chain="straight_through", generator=generator()))
            .mean()
        ),
    ),
    "expected_energy": (
        RBM,
        {"data": DATA, "of_rows": draw(20, 6)},
        lambda p, c: (c["of_rows"] * expected_energy(machine(p), c["data"])).sum(),
    ),
    "fast_weights": (
        {"fast": draw(21, 4, 3), "weights": RBM["weights"]},
        {"first": draw(22, 4, 3), "second": draw(23, 4, 3)},
        fast_weights,
    ),
    "centred": (
        RBM,
        {"data": DATA, "negative": STARTS},
        lambda p, c: energy_difference(
            centered(machine(p), centering_offsets(machine(p), c["data"])), c["data"], c["negative"], "free"
        ),
    ),
    "exact_divergence": (
        RBM,
        {"start": START, "visible_states": BITS[4], "hidden_states": BITS[3]},
        lambda p, c: exact_divergence(machine(p), c["start"], steps=2, divergence="improved"),
    ),
    "adversarial_example": (NETWORK, {"x": POINTS, "one_hot": one_hot(CLASSES, 3)}, example),
    "held_trades": (
        NETWORK,
        {"x": POINTS, "example": POINTS + 0.3 * draw(24, 5, 3), "one_hot": one_hot(CLASSES, 3)},
        lambda p, c: held_trades_loss(
            network(p), c["x"], CLASSES, beta=6.0, attack=lambda *_, **__: c["example"].clone()
        ),
    ),
    "virtual_adversarial": (
        BINARY,
        {"x": POINTS, "minus_at_the_likelier": 1 - 2 * one_hot(likelier, 2)},
        lambda p, c: vat_loss(network(p), c["x"], epsilon=0.3, bounds=None),
    ),
    "curvature": (
        NETWORK,
        {"x": POINTS, "one_hot": one_hot(CLASSES, 3)},
        lambda p, c: cure_loss(network(p), c["x"], CLASSES, h=0.4, weight=4.0, norm="l2"),
    ),
    "weight_perturbation": (NETWORK, {"x": POINTS, "one_hot": one_hot(CLASSES, 3)}, perturbed),
}
PEERS = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not installed"))
    for name in peer_programs.LIBRARIES
]
CASES = [
    (program.__name__, opened)
    for program, blocks in peer_programs.PROGRAMS.items()
    for opened in peer_programs.variants(blocks)
]


def ours(name: str, opened: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the value and the gradients of a surrogate of this project."""
    values, constants, loss = OURS[name]
    leaves = (
        Leaves(values) if name == "weight_perturbation" else {n: v.clone().requires_grad_() for n, v in values.items()}
    )
    with unblock(*opened):
        value = loss(leaves, constants)
        slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value, dict(zip(leaves, slopes, strict=True))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, np.ndarray]]:
    """Run all programs of a peer in one process, once."""
    folder, known = tmp_path_factory.mktemp("peers"), {}
    inputs = {
        peer_programs.key(name, part, leaf): value.numpy()
        for name, (parameters, constants, _) in OURS.items()
        for part, leaves in (("parameter", parameters), ("constant", constants))
        for leaf, value in leaves.items()
    }
    np.savez(folder / "in.npz", **inputs)

    def results(peer: str) -> Mapping[str, np.ndarray]:
        if peer not in known:
            paths = [str(folder / "in.npz"), str(folder / f"{peer}.npz")]
            command = [sys.executable, "-m", "peer_programs", peer, *paths]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS)
            assert done.returncode == 0, done.stderr
            with np.load(folder / f"{peer}.npz") as archive:
                known[peer] = dict(archive)
        return known[peer]

    return results


@pytest.mark.parametrize("peer", PEERS)
@each(("name", "opened"), CASES)
def test_a_peer_finds_the_same_value_and_gradient(theirs, peer, name, opened):
    value, gradient = ours(name, opened)
    found = {leaf: theirs(peer)[peer_programs.key(name, "+".join(opened), leaf)] for leaf in ("value", *gradient)}
    np.testing.assert_allclose(found["value"], value.detach().numpy(), rtol=1e-10, atol=1e-12)
    for leaf, slope in gradient.items():
        error = np.linalg.norm(found[leaf] - slope.numpy())
        assert error <= 1e-10 * np.linalg.norm(slope.numpy()) + 1e-12, (leaf, error)


# Opening these changes nothing, which is why they are blocked.
WITHOUT_LEAK = {"self_supervised.hard_label", "softmax.shift"}


@each(("name", "opened"), [case for case in CASES if case[1]])
def test_opening_changes_the_gradient_that_is_compared(name, opened):
    """Or a peer that forgot its `stop_gradient` would agree as well."""
    (_, blocked), (_, leaking) = ours(name, ()), ours(name, opened)
    changed = max(float((blocked[leaf] - leaking[leaf]).abs().max()) for leaf in blocked)
    assert (changed > 1e-3) == (not set(opened) <= WITHOUT_LEAK)


def test_every_block_of_the_toolkit_is_tried_with_the_peers_or_has_a_reason():
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(toolkit.__path__, "toolkit.")
        if not info.name.endswith("__main__")
    ]
    declared = {value.name for module in modules for value in vars(module).values() if isinstance(value, Block)}
    tried = {name for blocks in peer_programs.PROGRAMS.values() for name in blocks} - {LEAKY.name}
    excused = {case.block.name for case in block_cases() if case.without_peer}
    assert declared == tried | excused & declared
    assert not tried & excused


def test_every_program_of_the_peers_has_one_of_ours():
    names = [program.__name__ for program in peer_programs.PROGRAMS]
    assert sorted(names) == sorted(OURS)
    assert not any("import torch" in file.read_text("utf-8") for file in (TESTS / "peer_programs").glob("*.py"))
