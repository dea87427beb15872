"""What attacks of other libraries do to a model, an input or a seed, and no attack here does.

Each test is named after a defect that was measured in a published library (torchattacks 3.5.1, foolbox 3.3.4,
Adversarial Robustness Toolbox 1.20.1, cleverhans, advertorch, adv-lib, robustness, and the code of papers), and is
asked of every attack.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from each import each
from torch import Tensor, nn

from toolkit import adversarial as adv
from toolkit.adversarial import (
    EXAMPLE,
    METHODS,
    apgd,
    carlini_wagner,
    ddn,
    deepfool,
    ensemble,
    evaluate_robustness,
    fab,
    fgsm,
    linearised,
    mi_fgsm,
    multi_target,
    pgd,
    rs_fgsm,
    square,
)
from toolkit.adversarial.attacks._random_directions import random_directions
from toolkit.adversarial.training.methods import BallArguments
from toolkit.blocks import opened

Attack = Callable[..., Tensor]

BALL: BallArguments = {"epsilon": 0.1, "norm": "linf", "bounds": (0, 1)}

# What the ensemble runs one after the other, in few steps.
SHORT = {
    "multi-target": partial(multi_target, steps=2),
    "APGD": partial(apgd, steps=6),
    "FAB": partial(fab, steps=2),
    "random directions": partial(random_directions, draws=4),
    "Square": partial(square, queries=4),
}

# Name -> attack, its own arguments, the norms it knows, and whether it needs a generator.
ATTACKS: dict[str, tuple[Attack, tuple[str, ...], bool]] = {
    "fgsm": (fgsm, ("linf", "l2", "l1"), False),
    "rs_fgsm": (rs_fgsm, ("linf", "l2", "l1"), True),
    "pgd": (partial(pgd, steps=3), ("linf", "l2", "l1"), False),
    "pgd in bfloat16": (partial(pgd, steps=3, gradient_dtype=torch.bfloat16), ("linf", "l2", "l1"), False),
    "pgd restarted": (partial(pgd, steps=2, restarts=2), ("linf", "l2", "l1"), True),
    "mi_fgsm": (partial(mi_fgsm, steps=3), ("linf", "l2", "l1"), False),
    "apgd": (partial(apgd, steps=6), ("linf", "l2", "l1"), False),
    "linearised": (linearised, ("linf", "l2", "l1"), False),
    "multi_target": (partial(multi_target, steps=4), ("linf", "l2", "l1"), False),
    "deepfool": (partial(deepfool, steps=2), ("linf", "l2", "l1"), False),
    "carlini_wagner": (partial(carlini_wagner, steps=3), ("l2",), False),
    "ddn": (partial(ddn, steps=3), ("l2",), False),
    "fab": (partial(fab, steps=2), ("linf", "l2", "l1"), False),
    "square": (partial(square, queries=10), ("linf", "l2", "l1"), True),
    "ensemble": (partial(ensemble, attacks=SHORT), ("linf", "l2", "l1"), False),
}
CASES = [(name, norm) for name, (_, norms, _) in ATTACKS.items() for norm in norms]
RADIUS = {"linf": 0.1, "l2": 0.5, "l1": 1.0}
every_attack = each(("name", "norm"), CASES)


class Drawing(nn.Module):
    """A layer that draws from the global generator in every mode, and counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.breaks_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.breaks_at is not None and self.calls >= self.breaks_at:
            raise RuntimeError("broken on purpose")
        return x + 0.0 * torch.rand(())


@pytest.fixture
def model() -> nn.Sequential:
    """A network in training mode with dropout, and a normalisation that the user froze."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        Drawing(),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
            parameter.grad = torch.full_like(parameter, 7.0)
    network[1].eval()
    network[0].weight.requires_grad_(False)
    return network


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(5, 1, 4, 4, generator=generator), torch.tensor([0, 1, 2, 1, 0])


def run(name: str, norm: str, model: nn.Module, x: Tensor, labels: Tensor, **changes: object) -> Tensor:
    attack, _, draws = ATTACKS[name]
    if draws:
        changes.setdefault("generator", torch.Generator().manual_seed(3))
    return attack(model, x, labels, **({"epsilon": RADIUS[norm], "norm": norm} | changes))


def traces(model: nn.Module, *tensors: Tensor) -> list[object]:
    """Everything that an attack could leave behind, by value."""
    values: list[object] = [torch.get_rng_state(), *[tensor.clone() for tensor in tensors]]
    for parameter in model.parameters():
        values += [parameter.detach().clone(), parameter.requires_grad]
        values.append(None if parameter.grad is None else parameter.grad.clone())
    values += [buffer.clone() for buffer in model.buffers()]
    return [*values, *[module.training for module in model.modules()], torch.is_grad_enabled()]


def same(one: list[object], other: list[object]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@every_attack
def test_gradients_modes_statistics_and_seeds_stay(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """foolbox, cleverhans, advertorch and ART change ``.grad``; torchattacks, ART, TRADES and robustness change modes;
    foolbox, cleverhans, adv-lib and fast_adversarial move the statistics of batch normalisation.
    """
    before = traces(model, *batch)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            example = run(name, norm, model, *batch)
        assert same(traces(model, *batch), before), mode
        assert example.dtype == batch[0].dtype
        assert not example.requires_grad


@every_attack
def test_nothing_stays_when_the_model_raises(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """torchattacks leaves the model in evaluation mode."""
    model[5].breaks_at = 1 if name in ("fgsm", "rs_fgsm", "linearised") else 2
    before = traces(model, *batch)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(name, norm, model, *batch)
    assert same(traces(model, *batch), before)


@every_attack
def test_result_is_a_constant_of_its_own(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """cleverhans returns what requires a gradient, and with epsilon 0 the input itself; so was FGSM in advertorch."""
    x, labels = batch
    x.requires_grad_()
    for epsilon in (RADIUS[norm], 0.0):
        example = run(name, norm, model, x, labels, epsilon=epsilon)
        assert example.grad_fn is None
        assert example.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@every_attack
def test_epsilon_zero_is_the_input(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """torchattacks' PGDL2 returns NaN there."""
    assert torch.equal(run(name, norm, model, *batch, epsilon=0.0), batch[0])


@every_attack
def test_ball_and_box_hold_in_exact_arithmetic(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """All exceed epsilon by a rounding; naive L2 scaling does in half of the rows. cleverhans casts to float32."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, labels = batch[0].to(dtype), batch[1]
        example = run(name, norm, copy.deepcopy(model).to(dtype), x, labels)
        assert example.dtype == dtype
        assert ((example >= 0) & (example <= 1)).all(), dtype
        offset = (example.double() - x.double()).flatten(1)
        size = torch.linalg.vector_norm(offset, {"linf": torch.inf, "l2": 2, "l1": 1}[norm], 1)
        assert (size <= RADIUS[norm]).all(), dtype


@every_attack
def test_input_below_the_box_by_a_rounding_is_accepted(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """torchattacks raises for a least value of -2.98e-8."""
    x, labels = batch
    x[0, 0, 0, 0] = -2.98e-8
    run(name, norm, model, x, labels)


@every_attack
def test_values_outside_of_the_box_are_refused(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """A normalised image is silently clipped elsewhere."""
    with pytest.raises(ValueError, match="`x` should lie within `bounds`"):
        run(name, norm, model, batch[0] * 3 - 1, batch[1])


@every_attack
def test_rows_do_not_depend_on_each_other(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Only advertorch tests it. The loss of a batch must not be a mean, nor a step scaled by the batch's norm."""
    if ATTACKS[name][2] or name == "ensemble":
        pytest.skip("its draws for a row depend on how many rows there are")
    model.double()
    x, labels = batch[0].double(), batch[1]
    together = run(name, norm, model, x, labels)
    for row in range(len(x)):
        alone = run(name, norm, model, x[row : row + 1], labels[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-9)


@every_attack
def test_epsilon_may_differ_between_rows(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """ART and advertorch alone can."""
    epsilon = RADIUS[norm] * torch.tensor([0.0, 0.25, 0.5, 1.0, 2.0], dtype=torch.float64)
    example = run(name, norm, model, *batch, epsilon=epsilon)
    offset = (example.double() - batch[0].double()).flatten(1)
    size = torch.linalg.vector_norm(offset, {"linf": torch.inf, "l2": 2, "l1": 1}[norm], 1)
    assert (size <= epsilon).all()
    assert torch.equal(example[0], batch[0][0])


@every_attack
def test_masked_pixels_stay(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """ART alone has a mask."""
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1:3, :2] = True
    example = run(name, norm, model, *batch, mask=mask)
    assert torch.equal(example[:, :, ~mask], batch[0][:, :, ~mask])


@every_attack
def test_layout_stays(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(2)).to(memory_format=torch.channels_last)
    network = nn.Sequential(nn.Conv2d(3, 1, 1), model)
    example = run(name, norm, network, x, batch[1])
    assert example.stride() == x.stride()


@every_attack
def test_a_frozen_model_can_be_attacked(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    model.requires_grad_(False)
    assert torch.equal(run(name, norm, model, *batch), run(name, norm, model, *batch))


class Wrapper:
    def __init__(self, network):
        self.parts = {"networks": [network]}

    def __call__(self, x):
        return self.parts["networks"][0](x)


class Hiding(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.hidden = [network]

    def forward(self, x):
        return self.hidden[0](x)


REGISTRY = {}


class ByName:
    def __call__(self, x):
        return REGISTRY["network"](x)


def _by_name(network):
    REGISTRY["network"] = network
    return ByName()


HOLDERS = {
    "object": Wrapper,
    "method of an object": lambda network: Wrapper(network).__call__,
    "module that hides it": Hiding,
    "module inside of another": lambda network: nn.Sequential(Hiding(network)),
    "registry": _by_name,
    "function in a closure": lambda network: lambda x: Wrapper(network)(x),
    "object in a long list": lambda network: partial(lambda _, one, x: one(x), [0.0] * 10**6, Wrapper(network)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_model_is_found_wherever_a_callable_keeps_it(holder: str, batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    network = nn.Sequential(nn.Linear(x[0].numel(), 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    network = nn.Sequential(nn.Flatten(), *network).to(x)
    labels = labels % 3
    expected = pgd(network.eval(), x, labels, epsilon=0.1, steps=3)
    before = {name: value.clone() for name, value in network.train().state_dict().items()}
    assert torch.equal(pgd(HOLDERS[holder](network), x, labels, epsilon=0.1, steps=3), expected)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    REGISTRY.clear()


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_no_extra_passes(norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """ART runs the model twice more a batch, TRADES once more a step, for numbers that are known."""
    calls: list[None] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    pgd(model, *batch, epsilon=RADIUS[norm], norm=norm, steps=4)
    assert len(calls) == 4


def test_restarts_keep_the_best_of_every_row(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """robustness (attacker.py) keeps the last restart of all rows: its `~` is that of bytes."""
    from toolkit.adversarial import margin_loss

    model.eval()
    generator = torch.Generator().manual_seed(5)
    single = partial(pgd, model, *batch, epsilon=0.3, steps=1, step_size=0.05, generator=generator)

    def losses(example: Tensor) -> Tensor:
        with torch.no_grad():
            return margin_loss(model(example), batch[1])

    each = torch.stack([losses(single()) for _ in range(6)])
    generator.manual_seed(5)
    together = losses(single(restarts=6))
    torch.testing.assert_close(together, each.amax(0))
    assert len(set(each.argmax(0).tolist())) > 1


def test_strongest_point_is_returned_where_none_is_adversarial(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """adv-lib returns the clean input there, on which nothing can be trained."""
    from toolkit.adversarial import margin_loss

    model.eval()
    x = batch[0]
    with torch.no_grad():
        labels = model(x).argmax(1)
        clean = margin_loss(model(x), labels)
        for attack in (partial(pgd, steps=5), partial(apgd, steps=5), multi_target):
            example = attack(model, x, labels, epsilon=1e-3)
            assert (model(example).argmax(1) == labels).all()
            assert (margin_loss(model(example), labels) > clean).all()


@every_attack
def test_open_block_gives_the_same_examples(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """Whether the attack is differentiated changes no value."""
    model.double()
    x, labels = batch[0].double(), batch[1]
    blocked = run(name, norm, model, x, labels)
    with opened(EXAMPLE):
        example = run(name, norm, model, x, labels)
    torch.testing.assert_close(example.detach(), blocked, rtol=0, atol=1e-12)


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    assert torch.get_default_dtype() == torch.float32
    yield
    assert torch.get_default_dtype() == torch.float32


# --- what a user gets wrong, and models that are odd -------------------------------------------------------------


class Odd(nn.Module):
    """A model that replaces a buffer, switches dropout on by itself, and begins in place."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.drop, self.layer = nn.Dropout(0.0), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.drop.train()
        return self.drop(self.layer(x.flatten(1)))


@every_attack
def test_replaced_buffers_and_modes_that_the_model_sets_are_given_back(
    name: str, norm: str, batch: tuple[Tensor, Tensor]
) -> None:
    odd = Odd().eval()
    before = odd.count
    run(name, norm, odd, *batch)
    assert odd.count is before
    assert before == 0
    assert not odd.drop.training


class _Shifted(nn.Module):
    """Pixels less one half: in a copy, or in their own memory, also where autograd does not see it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "copy":
            return x - 0.5
        if self.way == "in place":
            return x.sub_(0.5)
        with torch.no_grad():
            (x.data if self.way == "data" else x).sub_(0.5)
        return x


@every_attack
def test_a_model_may_begin_in_place(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    before = x.clone()
    expected = run(name, norm, nn.Sequential(_Shifted("copy"), model), x, labels)
    for way in ("in place", "no_grad", "data"):
        found = run(name, norm, nn.Sequential(_Shifted(way), model), x, labels)
        assert torch.equal(x, before), way
        assert torch.equal(found, expected), way


@pytest.mark.parametrize("name", METHODS)
def test_a_trained_model_may_begin_in_place(name: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    before = x.clone()

    def loss_and_gradients(way: str) -> list[Tensor]:
        trained = nn.Sequential(_Shifted(way), copy.deepcopy(model))
        with torch.random.fork_rng():
            torch.manual_seed(0)  # dropout
            loss = METHODS[name]().loss(trained, x, labels, ball=BALL, generator=torch.Generator().manual_seed(0))
        return [loss, *torch.autograd.grad(loss, [p for p in trained.parameters() if p.requires_grad])]

    expected = loss_and_gradients("copy")
    for way in ("in place", "no_grad", "data"):
        for found, value in zip(loss_and_gradients(way), expected, strict=True):
            assert torch.equal(found, value), way
        assert torch.equal(x, before), way


@pytest.mark.parametrize("name", METHODS)
def test_a_model_to_be_trained_returns_logits_alone(name: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(TypeError, match=r"^`model` should return logits, a tensor \(N, C\).*Found tuple"):
        METHODS[name]().loss(lambda x: (model(x), x), *batch, ball=BALL, generator=torch.Generator().manual_seed(0))


@every_attack
def test_examples_have_the_memory_layout_of_the_inputs(
    name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    x = batch[0].to(memory_format=torch.channels_last)
    assert run(name, norm, model, x, batch[1]).stride() == x.clone().stride()


@every_attack
def test_logits_may_have_another_dtype(name: str, norm: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    wide = nn.Sequential(model, _Double())
    example = run(name, norm, wide, *batch)
    assert example.dtype == torch.float32


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_infinite_slope_makes_no_nan(norm: str) -> None:
    """The root has an infinite derivative at a black pixel."""
    x = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 0
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).abs()
    for attack in (pgd, mi_fgsm, fgsm, multi_target, apgd):
        example = attack(lambda x: x.sqrt() @ weight, x, torch.zeros(6, dtype=torch.long), epsilon=0.1, norm=norm)
        assert example.isfinite().all()


def test_model_without_a_gradient_is_left_to_queries(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch[0].flatten(1), batch[1]
    weight = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    opaque = lambda x: x.detach() @ weight  # noqa: E731
    labels = opaque(x).argmax(1)
    with pytest.warns(UserWarning, match="may be too high: linearised, multi-target, "):
        found = evaluate_robustness(opaque, x, labels, epsilon=0.5)
    assert set(found.skipped) == set(found.broken) - {"random directions", "Square"}
    assert found.broken["random directions"] > 0
    queried = evaluate_robustness(opaque, x, labels, epsilon=0.5, attacks={"Square": square})
    assert queried.broken["Square"] > 0
    assert "no gradient" in str(found)
    with pytest.raises(RuntimeError, match="should be differentiable with respect to its input"):
        pgd(opaque, x, labels, epsilon=0.1)


ROUNDED = {
    "interval_bounds": lambda model, x: adv.interval_bounds(model, x - 0.1, x + 0.1),
    "crown_bounds": lambda model, x: adv.crown_bounds(model, x - 0.1, x + 0.1),
    "interval_loss": lambda model, x: [adv.interval_loss(model, x, torch.tensor([0, 1, 2, 1, 0]), epsilon=0.1)],
    "vat_direction": lambda model, x: [adv.vat_direction(model, x)],
    "power_direction": lambda model, x: [adv.power_direction(model, x, generator=torch.Generator().manual_seed(0))],
}


@pytest.mark.parametrize("call", ROUNDED.values(), ids=ROUNDED)
def test_bounds_and_directions_keep_their_digits_under_autocast(call, batch: tuple[Tensor, Tensor]) -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), batch[0]
    plain = call(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(model, x)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def test_model_made_in_inference_mode_is_refused_or_copied(batch: tuple[Tensor, Tensor]) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(RuntimeError, match=r"Found tensors that were made in `torch\.inference_mode`: copy the model"):
        pgd(model, *batch, epsilon=0.1)
    assert pgd(copy.deepcopy(model), *batch, epsilon=0.1).shape == batch[0].shape


WIDE = {
    "pgd": lambda model, x, labels: pgd(model, x, labels, epsilon=8),
    "a ball": lambda model, x, labels: fgsm(model, x, labels, ball=adv.Ball(torch.tensor([8, 9.0, 8, 8, 8]))),
    "minimal": lambda model, x, labels: adv.fab(model, x, labels, epsilon=8, steps=1),
    "ensemble": lambda model, x, labels: evaluate_robustness(model, x, labels, epsilon=8),
    "certify_crown": lambda model, x, labels: adv.certify_crown(model, x, labels, epsilon=8),
    "interval_loss": lambda model, x, labels: adv.interval_loss(model, x, labels, epsilon=8),
    "free_loss": lambda model, x, labels: adv.free_loss(model, x, labels, perturbation=0 * x, epsilon=8),
    "loss of a method": lambda model, x, labels: adv.PGD(steps=2).loss(
        model, x, labels, ball={"epsilon": 8, "norm": "linf", "bounds": (0, 1)}, generator=torch.Generator()
    ),
    "train": lambda model, x, labels: adv.train(
        model, x, labels, method="pgd", epsilon=8, epochs=2, generator=torch.Generator(), evaluate=(x, labels)
    ),
}


@pytest.mark.parametrize("call", WIDE.values(), ids=WIDE)
def test_ball_as_wide_as_the_box_is_remarked_on_once_where_it_is_used(call, batch: tuple[Tensor, Tensor]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), *batch)
    found = [warning for warning in caught if "less than the width of the box, 1. Found 8" in str(warning.message)]
    assert [warning.filename for warning in found] == [__file__]


ROUND = {
    "an attack": lambda model, x, labels, **ball: pgd(model, x, labels, **ball),
    "minimal": lambda model, x, labels, **ball: adv.fab(model, x, labels, steps=1, **ball),
    "vat_loss": lambda model, x, labels, **ball: adv.vat_loss(model, x, **ball),
    "train": lambda model, x, labels, **ball: adv.train(
        model, x, labels, method="pgd", epochs=2, batch_size=2, generator=torch.Generator(), **ball
    ),
}


@pytest.mark.parametrize(("norm", "width"), [("l2", 4), ("l1", 16)])
@pytest.mark.parametrize("call", ROUND.values(), ids=ROUND)
def test_round_ball_as_wide_as_the_diagonal_of_the_box_is_remarked_on_once(call, norm, width, batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), *batch, epsilon=0.99 * width, norm=norm)
        assert not [warning for warning in caught if "the width of the box" in str(warning.message)]
        call(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), *batch, epsilon=width, norm=norm)
    remark = f"the width of the box in {norm.upper()}, {width}. Found {width}"
    assert [warning.filename for warning in caught if remark in str(warning.message)] == [__file__]


def test_whole_box_and_narrow_balls_in_any_units_pass_without_a_remark(batch: tuple[Tensor, Tensor]) -> None:
    model, (x, labels) = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), batch
    for options in ({"epsilon": 8, "bounds": (0, 255)}, {"epsilon": 8, "bounds": None}, {"epsilon": 0.99}):
        pgd(model, x, labels, steps=1, **options)
    adv.deepfool(model, x, labels, steps=1)


WRONG = {
    "labels as an array": (
        {"labels": [0, 1, 2, 1, 0]},
        TypeError,
        "`labels` should be a tensor of integers. Found list",
    ),
    "input as an array": ({"x": [[0.5]]}, TypeError, "`x` should be a tensor. Found list"),
    "target as a number": ({"targets": 1}, TypeError, "`targets` should be a tensor of integers. Found int"),
    "label too large": (
        {"labels": torch.tensor([0, 1, 3, 1, 0])},
        ValueError,
        "`labels` should be from 0 to 2. Found 0 to 3",
    ),
    "label too small": (
        {"labels": torch.tensor([0, -1, 2, 1, 0])},
        ValueError,
        "`labels` should be from 0 to 2. Found -1 to 2",
    ),
    "epsilon as text": (
        {"epsilon": "8/255"},
        TypeError,
        "`epsilon` should be a number, or a tensor with one per sample. Found '8/255'",
    ),
    "no epsilon": ({"epsilon": None, "step_size": None}, TypeError, "`epsilon` should be a number"),
    "three bounds": (
        {"bounds": (0, 1, 2)},
        TypeError,
        "the least and the greatest value of an input, or None. Found 3 of them",
    ),
    "half of the bounds": (
        {"bounds": (None, 1)},
        TypeError,
        "the least and the greatest value of an input, or None. Found NoneType and int",
    ),
    "bounds as text": (
        {"bounds": ("0", "1")},
        TypeError,
        "the least and the greatest value of an input, or None. Found str and str",
    ),
    "one bound": ({"bounds": 1.0}, TypeError, "the least and the greatest value of an input, or None. Found float"),
    "bounds in the wrong order": ({"bounds": (1, 0)}, ValueError, "the least value before the greatest. Found 1 and 0"),
    "seed for a generator": (
        {"generator": 0},
        TypeError,
        "`generator` should be a torch.Generator, or None. Found int",
    ),
    "loss by name": ({"loss": "ce"}, TypeError, "`loss` should be a function of logits and labels. Found str"),
    "dtype by name": (
        {"gradient_dtype": "bfloat16"},
        TypeError,
        "`gradient_dtype` should be a floating-point torch.dtype",
    ),
    "dtype of integers": (
        {"gradient_dtype": torch.int8},
        TypeError,
        "`gradient_dtype` should be a floating-point torch.dtype",
    ),
    "model that returns a dictionary": (
        {"model": lambda x: {"logits": x}},
        TypeError,
        "`model` should return logits, a tensor .N, C.. Found dict",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistake_is_named(name: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    changes, error, message = WRONG[name]
    arguments = {"model": model, "x": batch[0], "labels": batch[1], "epsilon": 0.1, "steps": 2}
    with pytest.raises(error, match=message):
        pgd(**(arguments | changes))


@pytest.mark.parametrize("attacks", [["pgd"], {"pgd": "pgd"}, {}], ids=["list", "names", "none"])
def test_attacks_that_are_none_are_refused(attacks: object, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(TypeError, match="`attacks` should be"):
        evaluate_robustness(model, *batch, epsilon=0.1, attacks=attacks)
