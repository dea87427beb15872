"""The experiments on adversarial training: seeded, and each with a target that is found without a block."""

import tomllib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from contract import relative_error
from folders import CONFIGS
from pydantic import ValidationError
from torch import nn

from experiments.adversarial import Config, _Attack, best_robust_loss, run
from toolkit import unblock
from toolkit.adversarial import EXAMPLE, robust_loss_linear
from toolkit.datasets import two_gaussians
from toolkit.runner._training import train

FOLDER = CONFIGS
CONFIGS = sorted(
    path.stem
    for path in FOLDER.glob("adversarial_*.toml")
    if tomllib.loads(path.read_text())["experiment"] == "adversarial"
)


def config(name: str, **changes: object) -> Config:
    return Config(**(tomllib.loads((FOLDER / f"{name}.toml").read_text()) | changes))


def gradient(name: str, *opened: object) -> dict[str, torch.Tensor]:
    experiment = run(config(name), seed=1)
    with unblock(*opened):
        gradients = torch.autograd.grad(experiment.loss(), list(experiment.parameters.values()))
    return dict(zip(experiment.parameters, gradients, strict=True))


@pytest.mark.parametrize("random_start", [False, True], ids=["from x", "random start"])
@pytest.mark.parametrize("name", CONFIGS)
def test_runs_of_a_seed_are_the_same_and_leave_the_global_generator_alone(name: str, random_start: bool) -> None:
    settings = config(name, steps=3, clean_steps=2, random_start=random_start)
    state = torch.get_rng_state()
    first, second = (train(run(settings, seed=1), settings).to_dict() for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert first["first_loss"] != train(run(settings, seed=2), settings).first_loss


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_can_be_repeated_also_with_a_random_start(name: str) -> None:
    experiment = run(config(name, clean_steps=0, random_start=True), seed=1)
    assert torch.equal(experiment.loss(), experiment.loss())


@pytest.mark.parametrize("random_start", [False, True], ids=["from x", "random start"])
def test_random_start_is_another_in_every_step_and_seed(random_start: bool) -> None:
    settings = config("adversarial_digits_l2", random_start=random_start)
    x, labels = torch.full((1, 64), 0.5), torch.tensor([0])
    examples = [
        _Attack(settings, seed, SimpleNamespace(step=step), (0.0, 1.0))(lambda x: x[:, :2], x, labels)
        for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    distinct = {tuple(example.flatten().tolist()) for example in examples}
    assert len(distinct) == (3 if random_start else 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocked_gradient_is_the_target(name: str) -> None:
    experiment = run(config(name), seed=1)
    assert relative_error(gradient(name), experiment.target()) < 1e-13


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("adversarial_digits_linf", 0.0, 0.0), ("adversarial_digits_l2", 0.1, 100.0), ("adversarial_linear", 0.0, 1e-14)],
)
def test_leak_is_what_the_finding_says(name: str, least: float, most: float) -> None:
    assert least <= relative_error(gradient(name, EXAMPLE), gradient(name)) <= most


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_best_robust_loss_is_a_minimum_of_the_exact_robust_loss(norm: str) -> None:
    data = two_gaussians(60, separation=2.0, n_features=3, generator=torch.Generator().manual_seed(0))
    best = best_robust_loss(data, epsilon=0.2, norm=norm)
    model = nn.Linear(3, 2).double()
    loss = partial(robust_loss_linear, *model.parameters(), data.inputs, data.labels, epsilon=0.2, norm=norm)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(bounds=None)
        value.backward()
        return value

    optimizer.step(closure)
    assert loss(bounds=None).item() == pytest.approx(best, abs=1e-8 if norm == "l2" else 1e-3)
    assert loss(bounds=None).item() >= best - 1e-9


def test_linear_training_goes_to_the_best_robust_loss() -> None:
    settings = config("adversarial_linear")
    experiment = run(settings, seed=0)
    objective = train(experiment, settings).metrics["objective"]
    assert objective[0] - experiment.objective.best > 0.1
    assert objective[-1] - experiment.objective.best < 1e-4


@pytest.mark.parametrize(("network", "widths"), [("cnn", [4, 6]), ("mlp", [7]), ("mlp", []), ("linear", [])])
def test_networks_take_digits(network: str, widths: list[int]) -> None:
    changes = {"network": network, "widths": widths, "epsilon": 0.02, "steps": 40, "learning_rate": 1e-2}
    settings = config("adversarial_digits_linf", **changes, evaluate_every=40)
    training = train(run(settings, seed=0), settings)
    robust, clean = (training.metrics[key][-1] for key in ("objective", "clean accuracy"))
    assert robust <= clean
    assert clean > training.metrics["clean accuracy"][0] + 0.1


def test_evaluation_attacks_held_out_digits() -> None:
    experiment = run(config("adversarial_digits_linf", epsilon=0.0), seed=0)
    metrics = experiment.evaluate()
    assert metrics["objective"] == metrics["clean accuracy"]
    assert metrics["robust loss (nats per sample)"] > 0


def test_closed_form_is_refused_for_a_network() -> None:
    with pytest.raises(ValidationError, match=r"`network` should be 'linear' for two Gaussians\. Found 'mlp'\."):
        config("adversarial_linear", network="mlp")
