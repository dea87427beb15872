"""The ensemble of attacks: as strong as exact verification where that can be had, and honest about what it counts."""

import re
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from relu_networks import NETWORKS, relu_network, split_digits
from torch import Tensor, nn

from toolkit import adversarial
from toolkit.adversarial import (
    apgd,
    certify_linear,
    ensemble,
    evaluate_robustness,
    fab,
    fgsm,
    multi_target,
    pgd,
    robust_accuracy,
    square,
    verify_relu,
)


@cache
def linear_classifier() -> tuple[nn.Linear, Tensor, Tensor]:
    """Return softmax regression on digits, and 540 digits that it has not seen."""
    x, labels, held_out, held_out_labels = split_digits()
    model = nn.Linear(64, 10).double()
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels) + 1e-3 * model.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model.requires_grad_(False), held_out, held_out_labels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [("linf", 0.05), ("linf", 0.1), ("linf", 0.2), ("l2", 0.25), ("l2", 0.5), ("l2", 1.0), ("l1", 1.0), ("l1", 2.0)],
)
def test_equals_the_closed_form_on_a_linear_classifier(norm: str, epsilon: float) -> None:
    """Peers' projected gradients miss it by .4 to 61 points: they stop short of the corner of ball and box."""
    model, x, labels = linear_classifier()
    margin = certify_linear(model.weight, model.bias, x, labels, epsilon=epsilon, norm=norm)
    found = evaluate_robustness(model, x, labels, epsilon=epsilon, norm=norm)
    assert torch.equal(found.robust, margin > 0)
    assert 0.01 < found.robust_accuracy < found.clean_accuracy
    assert found.clean_accuracy > 0.94


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_exact_verification_of_small_networks(name: str) -> None:
    model, x, labels, epsilon = relu_network(name)
    verdict = verify_relu(model, x, labels, epsilon=epsilon)
    found = evaluate_robustness(model, x, labels, epsilon=epsilon)
    assert torch.equal(found.robust, verdict.robust)
    assert 0.1 < found.robust_accuracy < found.clean_accuracy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_confidence_hides_nothing(dtype: torch.dtype) -> None:
    """The same network with larger logits errs at the same inputs. Cross entropy in float32 calls it .97 robust."""
    model, x, labels, epsilon = relu_network("64-32-10 standard")
    x, model = x.to(dtype), model.to(dtype)
    try:
        plain = evaluate_robustness(model, x, labels, epsilon=epsilon)
        for scale in (10.0, 100.0, 1000.0):
            loud = evaluate_robustness(lambda x, scale=scale: scale * model(x), x, labels, epsilon=epsilon)
            assert torch.equal(plain.robust, loud.robust), scale
    finally:
        model.double()
    assert 0.3 < plain.robust_accuracy < 0.95


@pytest.mark.portable
def test_rows_are_counted_once() -> None:
    model, x, labels, epsilon = relu_network("64-32-10 at .2")
    found = evaluate_robustness(model, x, labels, epsilon=epsilon)
    assert sum(found.broken.values()) == (found.correct & ~found.robust).sum()
    assert list(found.broken) == list(found.seconds)
    with torch.no_grad():
        assert torch.equal(model(found.examples).argmax(1) == labels, found.robust)
        assert torch.equal(model(x).argmax(1) == labels, found.correct)
    assert torch.equal(found.examples[~found.correct], x[~found.correct])
    text = str(found)
    assert f"{found.clean_accuracy:.4f}" in text.splitlines()[0]
    assert f"{found.robust_accuracy:.4f}" in text.splitlines()[-1]


@pytest.mark.slow
def test_is_an_attack_like_the_others() -> None:
    model, x, labels, epsilon = relu_network("64-32-10 at .1")
    found = evaluate_robustness(model, x, labels, epsilon=epsilon)
    assert torch.equal(ensemble(model, x, labels, epsilon=epsilon), found.examples)
    assert robust_accuracy(model, x, labels, epsilon=epsilon) == found.robust_accuracy


def test_rows_that_hold_get_the_strongest_example_that_was_tried() -> None:
    model, x, labels, epsilon = relu_network("64-32-10 at .1")
    found = evaluate_robustness(model, x, labels, epsilon=epsilon)
    weak = pgd(model, x, labels, epsilon=epsilon, steps=3)

    def margin(example: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(example)
        return logits.scatter(1, labels[:, None], -torch.inf).amax(1) - logits.gather(1, labels[:, None])[:, 0]

    assert (margin(found.examples)[found.robust] >= margin(weak)[found.robust] - 1e-12).all()


def test_attacks_of_ones_own_see_only_what_still_stands() -> None:
    model, x, labels, epsilon = relu_network("64-32-10 at .2")
    seen: list[int] = []

    def counted(model: nn.Module, x: Tensor, labels: Tensor, *, epsilon: Tensor, **others: object) -> Tensor:
        assert epsilon.shape == (len(x),)
        seen.append(len(x))
        return fgsm(model, x, labels, epsilon=epsilon)

    found = evaluate_robustness(model, x, labels, epsilon=epsilon, attacks={"one": counted, "two": counted})
    assert seen == [int(found.correct.sum()), int(found.robust.sum())]
    assert found.broken["two"] == 0


def test_attack_that_cheats_breaks_nothing() -> None:
    """An example out of the ball is brought back before it is judged."""
    model, x, labels, _ = relu_network("64-32-10 at .1")
    flipped = lambda model, x, labels, **others: 1 - x  # noqa: E731
    found = evaluate_robustness(model, x, labels, epsilon=1e-6, attacks={"cheat": flipped})
    assert found.broken == {"cheat": 0}
    assert ((found.examples - x).abs() <= 1e-6).all()


@pytest.mark.slow
def test_model_without_gradients_is_broken_by_queries() -> None:
    """A staircase has derivative 0 almost everywhere: attacks by gradients stand still, and call it robust."""
    model, x, labels, _ = relu_network("64-32-10 standard")
    staircase = lambda x: model((20 * x).floor() / 20 + 0 * x)  # noqa: E731
    with pytest.warns(UserWarning, match="zero gradient for 100 of 100"):
        gradients = evaluate_robustness(staircase, x, labels, epsilon=0.1, attacks={"pgd": from_the_input})
    with pytest.warns(UserWarning, match="zero gradient for 100 of 100"):
        whole = evaluate_robustness(staircase, x, labels, epsilon=0.1)
    assert gradients.robust_accuracy == gradients.clean_accuracy
    assert whole.broken["random directions"] + whole.broken["Square"] > 0.1 * len(x)
    assert whole.broken["Square"] > 0


def from_the_input(model: nn.Module, x: Tensor, labels: Tensor, *, generator: object, **others: object) -> Tensor:
    return pgd(model, x, labels, **others, steps=20)


def test_what_is_no_number_breaks_a_row() -> None:
    model, x, labels, _ = relu_network("64-32-10 at .1")
    breaks = lambda x: model(x) + torch.where((x[:, :1] > 0.05) & (x[:, :1] < 0.1), torch.nan, 0.0)  # noqa: E731
    found = evaluate_robustness(
        breaks, x, labels, epsilon=0.07, attacks={"shift": lambda model, x, labels, **others: x + 0.06}
    )
    assert (~found.robust).all()


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_batches_do_not_matter_to_what_draws_nothing(norm: str) -> None:
    model, x, labels, _ = relu_network("64-24-24-10 at .1")
    radius = {"linf": 0.1, "l2": 0.7, "l1": 2.0}[norm]
    attacks = {"multi-target": multi_target}
    one, many = (
        evaluate_robustness(model, x[:30], labels[:30], epsilon=radius, norm=norm, attacks=attacks, batch_size=size)
        for size in (30, 7)
    )
    assert torch.equal(one.robust, many.robust)
    torch.testing.assert_close(one.examples, many.examples, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_sizes_bounds_and_masks_follow_their_rows() -> None:
    model, x, labels, _ = relu_network("64-32-10 at .2")
    epsilon = torch.linspace(0.0, 0.3, len(x), dtype=torch.float64)
    mask = torch.zeros(len(x), 64, dtype=torch.bool)
    mask[::2] = True
    bounds = (torch.zeros(64, dtype=torch.float64), x.clamp(min=0.9))
    found = evaluate_robustness(model, x, labels, epsilon=epsilon, mask=mask, bounds=bounds, batch_size=33)
    assert ((found.examples - x).abs().amax(1) <= epsilon).all()
    assert torch.equal(found.examples[1::2], x[1::2])
    assert (found.examples <= bounds[1]).all()
    assert found.robust[1::2].equal(found.correct[1::2])
    assert not found.robust.equal(found.correct)


def test_same_call_gives_the_same_figures_and_leaves_the_global_generator_alone() -> None:
    model, x, labels, epsilon = relu_network("64-64-10 at .1")
    state = torch.get_rng_state()
    one, other = (evaluate_robustness(model, x[:40], labels[:40], epsilon=epsilon) for _ in range(2))
    assert torch.equal(one.examples, other.examples)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_classes_and_no_rows() -> None:
    weight = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    found = evaluate_robustness(lambda x: x @ weight.T, torch.rand(0, 2), torch.arange(0), epsilon=0.1)
    assert found.examples.shape == (0, 2)
    x = torch.tensor([[0.9, 0.1], [0.6, 0.5]])
    assert robust_accuracy(lambda x: x @ weight.T, x, torch.tensor([0, 0]), epsilon=0.2) == 0.5


@pytest.mark.slow
def test_square_alone_needs_no_gradient() -> None:
    model, x, labels, _ = relu_network("64-32-10 standard")

    def opaque(x: Tensor) -> Tensor:
        return torch.as_tensor(model(torch.as_tensor(x.detach().numpy())).detach().numpy())

    found = evaluate_robustness(opaque, x, labels, epsilon=0.1, attacks={"Square": square})
    assert found.broken["Square"] > 0.1 * len(x)


def test_progress_names_each_attack_and_what_it_left(capsys):
    weight = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    x, labels = torch.tensor([[0.9, 0.1], [0.6, 0.5], [0.1, 0.7]]), torch.tensor([0, 0, 0])
    attacks = {"FGSM": lambda *args, generator, **options: fgsm(*args, **options)}
    run = partial(robust_accuracy, lambda x: x @ weight.T, x, labels, epsilon=0.2, attacks=attacks)
    assert run(verbose=1, batch_size=2) == run()
    assert capsys.readouterr().out == (
        "Batch 1 of 2: 2 rows, 2 correct\n  FGSM: 1 broken, 1 left\n"
        "Batch 2 of 2: 1 rows, 0 correct\n  FGSM: 0 broken, 0 left\n"
    )
    run(verbose=2)
    assert re.search(r"FGSM: 1 broken, 1 left, [\d.]+ s", capsys.readouterr().out)


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.2), ("l2", 0.3), ("l1", 0.5)])
def test_a_model_that_is_flat_around_its_inputs_is_broken_where_exact_search_breaks_it(norm, epsilon):
    """A class wins where one of six units is on, and all are off at the inputs: no gradient leads to it."""
    draws = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    weight = torch.randn(6, 5, generator=draws, dtype=torch.float64)
    x = 0.5 + 0.1 * torch.rand(20, 5, generator=draws, dtype=torch.float64)
    order = {"linf": 1, "l2": 2, "l1": torch.inf}[norm]
    with torch.no_grad():
        network[0].weight.copy_(weight)
        network[0].bias.copy_(-0.55 * weight.sum(1) - 0.8 * epsilon * weight.norm(order, 1))
        network[2].weight.copy_(torch.stack([torch.zeros(6), torch.full((6,), 50.0)]))
        network[2].bias.copy_(torch.tensor([2.0, 0.0]))
    labels = torch.zeros(20, dtype=torch.long)
    exact = verify_relu(network, x, labels, epsilon=epsilon, norm=norm)
    run = partial(evaluate_robustness, network, x, labels, epsilon=epsilon, norm=norm)
    with pytest.warns(UserWarning, match="zero gradient"):
        found = run()
    with pytest.warns(UserWarning, match="zero gradient"):
        without = run(attacks={"multi-target": multi_target, "APGD": apgd, "FAB": fab})
    assert torch.equal(found.robust, exact.robust)
    assert not exact.robust.all()
    assert without.robust.sum() > exact.robust.sum()


@pytest.mark.parametrize("name", ["fgsm", "ni_fgsm", "linearised", "deepfool", "fab", "mi_fgsm", "pgd"])
def test_every_attack_may_be_one_of_an_ensemble(name: str) -> None:
    """Those that draw nothing take no generator."""
    attack = getattr(adversarial, name)
    x, labels = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2] * 2)
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for one in (attack, partial(attack)):
        found = evaluate_robustness(lambda x: x @ weight.T, x, labels, epsilon=0.3, attacks={name: one})
        assert found.broken.keys() == {name}


def test_an_attack_of_ones_own_takes_a_generator_if_it_can() -> None:
    given = []

    def silent(model, x, labels, *, epsilon, norm, bounds, mask):
        given.append(None)
        return x

    def drawing(model, x, labels, **options):
        given.append(options["generator"])
        return x

    attacks = {"silent": silent, "drawing": drawing}
    evaluate_robustness(
        lambda x: x, torch.rand(3, 3).add(torch.eye(3)) / 2, torch.arange(3), epsilon=0.1, attacks=attacks
    )
    assert given[0] is None
    assert isinstance(given[1], torch.Generator)


def test_one_radius_is_no_curve() -> None:
    with pytest.raises(TypeError, match=r"`epsilons` should be radii, as in \[0\.1, 0\.2\]\. Found float\."):
        adversarial.robustness_curve(lambda x: x, torch.rand(3, 3), torch.arange(3), epsilons=0.1)
