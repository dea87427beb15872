"""Attacks that change few coordinates, beside exhaustive searches; SPSA beside the exact worst case."""

import itertools

import pytest
import torch
from torch import Tensor

from toolkit import adversarial as adv


def _linear(seed: int, n_classes: int, n_features: int):
    draws = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_classes, n_features, generator=draws, dtype=torch.float64)
    return lambda x: x.flatten(1).to(weight.dtype) @ weight.T


def _pairwise(model, x: Tensor, target: int, *, steps: int, theta: float) -> Tensor:
    """The saliency map attack of one sample, by loops over pairs."""
    x = x.clone()
    for _ in range(steps):
        if int(model(x[None]).argmax()) == target:
            break
        jacobian = torch.autograd.functional.jacobian(lambda x: model(x[None])[0], x)
        gain, loss = jacobian[target], jacobian.sum(0) - jacobian[target]
        best, chosen = 0.0, None
        for i, j in itertools.combinations(range(len(x)), 2):
            a, b = theta * (gain[i] + gain[j]), theta * (loss[i] + loss[j])
            is_free = all(x[k] < 1 if theta > 0 else x[k] > 0 for k in (i, j))
            if is_free and a > 0 > b and -a * b > best:
                best, chosen = float(-a * b), (i, j)
        if chosen is None:
            break
        for k in chosen:
            x[k] = (x[k] + theta).clamp(0, 1)
    return x


@pytest.mark.parametrize("theta", [1.0, -1.0, 0.3])
def test_the_saliency_map_chooses_the_pairs_of_a_search_by_loops(theta):
    model = adv.mlp(7, 3, widths=[9], generator=torch.Generator().manual_seed(5)).double()
    x = torch.rand(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = (model(x).argmax(1) + 1) % 3
    found = adv.jsma(model, x, targets=targets, share=0.9, theta=theta)
    expected = [
        _pairwise(model, row, int(target), steps=3, theta=theta) for row, target in zip(x, targets, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected))
    assert not torch.equal(found, x)


def test_the_saliency_map_changes_no_more_than_its_share_and_the_mask():
    model = adv.mlp(8, 3, widths=[9], generator=torch.Generator().manual_seed(2))
    x = torch.rand(5, 8, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(8) != 3
    changed = adv.jsma(model, x, share=0.5, mask=mask) != x
    assert changed.sum(1).max() <= 4
    assert not changed[:, 3].any()


@pytest.mark.parametrize("seed", range(5))
def test_sparsefool_changes_as_few_coordinates_as_any_attack_on_a_linear_model(seed):
    """From the centre of the box: the fewest coordinates whose faces change the answer, by trying all sets."""
    model, x = _linear(seed, 2, 7), torch.full((1, 7), 0.5, dtype=torch.float64)
    label = model(x).argmax(1)
    found = adv.sparsefool(model, x, overshoot=1.0001)
    assert model(found).argmax(1) != label
    corners = torch.tensor(list(itertools.product([0.0, 0.5, 1.0], repeat=7)), dtype=torch.float64)
    fewest = (corners != 0.5).sum(1)[model(corners).argmax(1) != label].min()
    assert (found != x).sum() == fewest


def test_sparsefool_crosses_the_boundary_of_a_network():
    model = adv.mlp(20, 4, widths=[16], generator=torch.Generator().manual_seed(0))
    x = torch.rand(10, 20, generator=torch.Generator().manual_seed(1))
    labels = model(x).argmax(1)
    found = adv.sparsefool(model, x, labels, overshoot=1.1)
    assert (model(found).argmax(1) != labels).all()
    assert (found != x).sum() < (adv.deepfool(model, x, labels) != x).sum() / 1.5
    assert 0 <= found.min() <= found.max() <= 1


def _sparsest(model, x: Tensor, label: Tensor, *, overshoot: float) -> Tensor:
    """Algorithm 2 of the paper for one sample, by a loop over its coordinates."""
    for _ in range(20):
        if model(x[None]).argmax() != label:
            break
        nearest = adv.deepfool(model, x[None], label[None])[0]
        beyond = (x + overshoot * (nearest - x)).requires_grad_()
        logits = model(beyond[None])[0]
        rivals = logits[torch.arange(len(logits)) != label]
        (normal,) = torch.autograd.grad(rivals.max() - logits[label], beyond)
        left, x = float(normal @ (beyond - x).detach()), x.clone()
        for i in normal.abs().argsort(descending=True):
            room = 1 - x[i] if normal[i] > 0 else x[i]
            length = min(float(room), left / float(normal[i].abs()))
            x[i] += length * normal[i].sign()
            left -= length * float(normal[i].abs())
            if left <= 0:
                break
    return x


def test_sparsefool_is_the_algorithm_of_the_paper():
    """The slope is that beyond the boundary; with the slope on it more coordinates change."""
    model = adv.mlp(20, 4, widths=[16], generator=torch.Generator().manual_seed(0)).double()
    x = torch.rand(10, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = model(x).argmax(1)
    expected = [_sparsest(model, row, label, overshoot=3.0) for row, label in zip(x, labels, strict=True)]
    torch.testing.assert_close(adv.sparsefool(model, x, labels), torch.stack(expected), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_one_pixel_finds_what_an_exhaustive_search_finds():
    """Of a linear model the best pixel has the values of a corner: all pixels and corners are tried."""
    model = _linear(0, 3, 2 * 3 * 3)
    x = torch.rand(40, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = model(x).argmax(1)
    margin = adv.difference_loss
    best = margin(model(x), labels)
    for row, column, *corner in itertools.product(range(3), range(3), [0.0, 1.0], [0.0, 1.0]):
        tried = x.clone()
        tried[:, :, row, column] = torch.tensor(corner, dtype=torch.float64)
        best = best.maximum(margin(model(tried), labels))
    found = adv.one_pixel(model, x, labels, population=400, generator=torch.Generator().manual_seed(0))
    assert ((found != x).any(1).flatten(1).sum(1) <= 1).all()
    reached = margin(model(found), labels)
    assert torch.equal(reached > 0, best > 0)
    assert 4 <= (best > 0).sum() <= 36  # else the line above says little
    robust = best <= 0
    torch.testing.assert_close(reached[robust], best[robust], rtol=0, atol=0.05)


def test_more_pixels_change_no_more_than_asked():
    model = _linear(0, 3, 9)
    x = torch.rand(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(9) > 1
    found = adv.one_pixel(model, x, pixels=3, steps=5, mask=mask, generator=torch.Generator().manual_seed(0))
    assert ((found != x).sum(1) <= 3).all()
    assert torch.equal(found[:, :2], x[:, :2])


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_spsa_reaches_the_exact_worst_case_of_a_linear_model(norm):
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 6, generator=draws, dtype=torch.float64)
    x = torch.rand(20, 6, generator=draws, dtype=torch.float64) * 0.6 + 0.2
    labels = (x @ weight.T).argmax(1)
    epsilon = 0.15 if norm == "linf" else 0.4
    exact = adv.certify_linear(weight, None, x, labels, epsilon=epsilon, norm=norm)
    options = {"epsilon": epsilon, "norm": norm, "steps": 60, "directions": 64}
    found = adv.spsa(lambda x: (x @ weight.T).round(decimals=6), x, labels, **options, generator=draws)
    reached = -adv.difference_loss(found @ weight.T, labels)
    robust = exact > 0.02
    assert 2 <= robust.sum() <= 18
    # Adam's steps have one length for all coordinates, so in L2 they end beside the gradient's direction.
    away = 0.01 if norm == "linf" else 0.06
    torch.testing.assert_close(reached[robust], exact[robust], rtol=0, atol=away)
    assert (reached[exact < -away] < 0).all()


def test_spsa_draws_for_a_row_do_not_depend_on_the_others():
    model = adv.mlp(6, 3, widths=[9], generator=torch.Generator().manual_seed(2))
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    run = lambda x: adv.spsa(model, x, epsilon=0.05, steps=3, generator=torch.Generator().manual_seed(0))  # noqa: E731
    torch.testing.assert_close(run(x)[3:], run(x[3:]))


@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=["wide", "another half"]
)
def test_spsa_estimates_to_the_same_digits_under_autocast(dtype, other):
    """The model has no product, so that autocast could change only the estimate."""
    weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run():
        draws = torch.Generator().manual_seed(0)
        return adv.spsa(lambda x: (x[:, None] * weight).sum(-1), x, epsilon=0.05, steps=3, generator=draws)

    plain = run()
    with torch.autocast("cpu", dtype=other):
        assert torch.equal(run(), plain)


WRONG = {
    "share": (lambda model, x: adv.jsma(model, x, share=0), "`share` should be above 0 and at most 1. Found 0."),
    "theta": (lambda model, x: adv.jsma(model, x, theta=0.0), "`theta` should not be 0. Found 0.0."),
    "overshoot": (
        lambda model, x: adv.sparsefool(model, x, overshoot=0.5),
        "`overshoot` should be finite and at",
    ),
    "bounds": (lambda model, x: adv.one_pixel(model, x, bounds=None, generator=None), "`bounds` should be finite"),
    "population": (
        lambda model, x: adv.one_pixel(model, x, population=3, generator=None),
        "`population` should be an integer from 4. Found 3.",
    ),
}


@pytest.mark.parametrize(("attack", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(attack, error):
    with pytest.raises(ValueError, match=error):
        attack(_linear(0, 2, 4), torch.rand(2, 4))
