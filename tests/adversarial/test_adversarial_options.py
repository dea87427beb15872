"""Labels that are not given, a radius for each feature, and several radii at once."""

from functools import partial

import pytest
import torch
from each import each

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
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint16])
def test_labels_may_have_any_width(attack, dtype):
    assert torch.equal(attack(NET, X, LABELS.to(dtype), epsilon=0.1), attack(NET, X, LABELS, epsilon=0.1))


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


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("attack", [partial(adv.deepfool, norm="linf"), adv.fab, _seeded(adv.fab, restarts=2)])
def test_the_nearest_example_of_a_linear_model_is_measured_in_the_radius_of_each_feature(attack, rows):
    """The least multiple of the radii with which the model errs, from where the gain in the box reaches the margin."""
    weight = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    radii = torch.logspace(-3, 0, 9, dtype=torch.float64)[torch.randperm(9, generator=torch.Generator().manual_seed(3))]
    epsilon = torch.stack([radii.roll(shift) for shift in range(rows)])
    epsilon[:, 4] = 0
    labels = (X @ weight.T).argmax(1)
    slope = weight[1 - labels] - weight[labels]
    margin = -(slope * X).sum(1, keepdim=True)
    room = torch.where(slope > 0, 1 - X, X)
    low, high = torch.zeros_like(margin), torch.full_like(margin, 100.0)
    for _ in range(60):
        middle = (low + high) / 2
        enough = (slope.abs() * torch.minimum(middle * epsilon, room)).sum(1, keepdim=True) > margin
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    reachable = high[:, 0] < 99
    assert reachable.sum() > 3
    for factor, errs in ((1 + 1e-9, True), (1 - 1e-9, False)):
        found = attack(lambda x: x @ weight.T, X, labels, epsilon=factor * high * epsilon)
        assert ((found @ weight.T).argmax(1) != labels)[reachable].tolist() == [errs] * int(reachable.sum())
        assert torch.equal(found[:, 4], X[:, 4])


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


@pytest.mark.slow
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


# --- arguments that no attack can answer ---------------------------------------------------------------------------

SPARSE = {
    "jsma": partial(adv.jsma, share=0.5),
    "sparsefool": adv.sparsefool,
    "one_pixel": _seeded(adv.one_pixel, steps=2, population=5),
}
EVERY = {
    **{name: partial(attack, epsilon=0.1) for name, attack in ATTACKS.items()},
    "vmi_fgsm": partial(_seeded(adv.vmi_fgsm), epsilon=0.1),
    "ddn": adv.ddn,
    "carlini_wagner": partial(adv.carlini_wagner, steps=5),
    **SPARSE,
}
NOT_LOGITS = {
    "one number each": (lambda x: x.sum(1), r"should return logits \(12, C\) with at least two classes. Found \(12,\)"),
    "one class": (lambda x: x[:, :1], r"should return logits \(12, C\) with at least two classes. Found \(12, 1\)"),
    "a batch of its own": (lambda x: NET(x[:5]), r"should return logits \(12, C\) with .* Found \(5, 3\)"),
    "images": (lambda x: x.view(-1, 3, 3), r"should return logits \(12, C\) with .* Found \(12, 3, 3\)"),
    "a dictionary": (lambda x: {"logits": NET(x)}, "should return logits, a tensor .* Found dict: pick"),
    "text": ("resnet", "should be a function of the inputs. Found str"),
}


@each("labels", [None, LABELS], ids=["answers", "labels"])
@each("model", NOT_LOGITS)
@pytest.mark.parametrize("attack", EVERY.values(), ids=EVERY)
def test_a_model_without_logits_is_named(attack, model, labels):
    function, error = NOT_LOGITS[model]
    with pytest.raises((TypeError, ValueError), match="^`model` " + error):
        attack(function, X, labels)


@pytest.mark.parametrize("label", [-1, 3])
@pytest.mark.parametrize("attack", EVERY.values(), ids=EVERY)
def test_a_label_out_of_range_is_named(attack, label):
    with pytest.raises(
        ValueError, match=rf"^`labels` should be from 0 to 2\. Found {min(label, 0)} to {max(label, 2)}"
    ):
        attack(NET, X, torch.arange(12).remainder(3).index_fill(0, torch.tensor([5]), label))


@pytest.mark.parametrize("attack", EVERY.values(), ids=EVERY)
def test_a_misspelt_keyword_is_named(attack):
    with pytest.raises(TypeError, match=r"named by `epsilon`, `norm`, `bounds` and `mask`, or by `ball`\. Found `eps`"):
        attack(NET, X, eps=0.1)


@pytest.mark.parametrize("option", [{"epsilon": 0.1}, {"norm": "l2"}, {"ball": adv.Ball(0.1)}], ids=str)
@pytest.mark.parametrize("attack", SPARSE.values(), ids=SPARSE)
def test_attacks_that_count_coordinates_refuse_a_ball(attack, option):
    with pytest.raises(TypeError, match=r"^`(epsilon|norm|ball)` should be left out of an attack that counts"):
        attack(NET, X, **option)


@pytest.mark.parametrize("attack", [adv.multi_target, adv.linearised, adv.ensemble, adv.robust_accuracy])
def test_attacks_on_all_classes_refuse_targets(attack):
    with pytest.raises(TypeError, match=r"^`targets` should be left out of an attack that tries all classes"):
        attack(NET, X, epsilon=0.1, targets=LABELS)
    attack(NET, X[:1], epsilon=0.1, targets=None)


def test_a_share_of_less_than_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"`share` should leave a pair of the 9 coordinates to change\. Found 0\.2"):
        adv.jsma(NET, X, share=0.2)


@pytest.mark.filterwarnings("ignore:`model` should have a gradient")  # by the ensemble, of the same row
@pytest.mark.parametrize("attack", EVERY.values(), ids=EVERY)
def test_logits_that_are_nan_make_no_example_that_is(attack):
    broken = lambda x: NET(x).masked_fill((x[:, :1] - X[0, 0]).abs() < 0.05, float("nan"))  # noqa: E731
    fixed = torch.ones(9, dtype=torch.bool).index_fill(0, torch.tensor([0]), False)  # so that it remains NaN
    labels = LABELS[:3].index_fill(0, torch.tensor([0]), 0)  # the answer that torch reads from NaN, so no success
    found = attack(broken, X[:3], labels, mask=fixed)
    assert found.isfinite().all()
    assert 0 <= found.min() <= found.max() <= 1
