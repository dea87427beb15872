"""Labels that are not given, a radius for each feature, and several radii at once."""

from functools import partial

import pytest
import torch

from toolkit import adversarial as adv

X = torch.rand(12, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NET = adv.mlp(9, 3, widths=[8], generator=torch.Generator().manual_seed(0)).double().eval()
LABELS = NET(X).argmax(1)


def _seeded(attack, **options):
    return lambda *args, **more: attack(*args, **options, **more, generator=torch.Generator().manual_seed(0))


ATTACKS = {
    "fgsm": adv.fgsm,
    "rs_fgsm": _seeded(adv.rs_fgsm),
    "pgd": adv.pgd,
    "mi_fgsm": adv.mi_fgsm,
    "ni_fgsm": adv.ni_fgsm,
    "apgd": partial(adv.apgd, steps=20),
    "linearised": adv.linearised,
    "multi_target": partial(adv.multi_target, steps=20),
    "fab": adv.fab,
    "deepfool": adv.deepfool,
    "square": _seeded(adv.square, queries=100),
    "spsa": _seeded(adv.spsa, directions=20),
    "ensemble": adv.ensemble,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_default_labels_are_the_answers(attack):
    assert torch.equal(attack(NET, X, epsilon=0.1, norm="linf"), attack(NET, X, LABELS, epsilon=0.1, norm="linf"))


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("rows", [1, 12])
def test_a_radius_for_each_feature_is_kept(attack, rows):
    epsilon = torch.rand(rows, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 4
    epsilon[:, 4] = 0
    found = attack(NET, X, epsilon=epsilon, norm="linf")
    allowed = adv.Ball(epsilon).around(X)
    assert ((allowed.lower <= found) & (found <= allowed.upper)).all()
    assert torch.equal(found[:, 4], X[:, 4])
    assert not torch.equal(found, X)


@pytest.mark.parametrize("attack", [adv.fgsm, adv.pgd, adv.apgd, adv.multi_target])
def test_equal_radii_of_all_features_are_one_radius(attack):
    assert torch.equal(
        attack(NET, X, epsilon=torch.full((1, 9), 0.1, dtype=torch.float64)), attack(NET, X, epsilon=0.1)
    )


def test_the_worst_case_of_a_linear_model_has_the_radius_of_each_feature():
    weight = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    epsilon = torch.linspace(0.01, 0.2, 9, dtype=torch.float64)[None]
    labels = (X @ weight.T).argmax(1)
    slope = (weight[1 - labels] - weight[labels]).sign()
    for attack in (adv.fgsm, adv.pgd, adv.linearised, partial(adv.apgd, until="end")):
        found = attack(lambda x: x @ weight.T, X, labels, epsilon=epsilon)
        torch.testing.assert_close(found, (X + epsilon * slope).clamp(0, 1))


@pytest.mark.parametrize(("norm", "shape"), [("l2", (1, 9)), ("linf", (12, 8)), ("linf", (2, 9))])
def test_radii_of_features_are_for_linf_and_of_the_shape_of_the_inputs(norm, shape):
    with pytest.raises(ValueError, match="`epsilon` should be one number or one per sample"):
        adv.pgd(NET, X, epsilon=torch.full(shape, 0.1), norm=norm)


def test_the_curve_of_a_linear_model_is_exact():
    weight = torch.randn(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = (X @ weight.T).argmax(1)
    epsilons = [0.2, 0.0, 0.05, 0.1]
    exact = {
        epsilon: (adv.certify_linear(weight, None, X, labels, epsilon=epsilon) > 0).double().mean().item()
        for epsilon in epsilons
    }
    found = adv.robustness_curve(lambda x: x @ weight.T, X, labels, epsilons=epsilons)
    assert found == exact
    assert list(found) == epsilons
    assert len(set(found.values())) > 2


def test_the_curve_takes_the_other_fields_of_a_ball():
    mask = torch.arange(9) < 5
    run = partial(adv.robustness_curve, NET, X, LABELS, epsilons=[0.1, 0.3])
    found = run(norm="l2", mask=mask)
    assert found[0.1] == adv.robust_accuracy(NET, X, LABELS, epsilon=0.1, norm="l2", mask=mask)
    assert found[0.1] >= found[0.3]


@pytest.mark.parametrize(
    ("epsilons", "error"),
    [([], "at least one. Found none."), ([0.1, -1.0], "`epsilons` should be finite and not negative")],
)
def test_wrong_radii_are_refused(epsilons, error):
    with pytest.raises(ValueError, match=error):
        adv.robustness_curve(NET, X, LABELS, epsilons=epsilons)
