"""Training methods at work: what a step touches and what not, what it is made of, and what it does to a model."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerator import ACCELERATOR
from each import each
from test_adversarial import fragile, snapshot
from torch import Tensor, nn

from toolkit import Block, unblock
from toolkit.adversarial.attacks._setting import EXAMPLE
from toolkit.adversarial.attacks.gradient import fgsm, pgd, rs_fgsm
from toolkit.adversarial.training import methods
from toolkit.adversarial.training.free import free_loss
from toolkit.adversarial.training.losses import adversarial_loss
from toolkit.adversarial.training.mart import mart_loss
from toolkit.adversarial.training.methods import AWP, METHODS, PGD, VAT, Free, Method
from toolkit.adversarial.training.pairing import alp_loss
from toolkit.adversarial.training.smoothness import CURVATURE_DIRECTION, cure_loss, linearity_pgd, llr_loss
from toolkit.adversarial.training.trades import held_trades_loss, nearby_pgd, trades_loss
from toolkit.adversarial.training.vat import VIRTUAL_CLEAN, VIRTUAL_DIRECTION, power_direction, vat_loss
from toolkit.adversarial.training.weights import awp_loss, reweighted, weight_perturbation

F64 = torch.float64
BALL = {"epsilon": 0.1, "norm": "linf", "bounds": (0, 1)}


# The methods with an attack of several steps, and what weighs, or is a length, in each method.
STEPPING = (methods.PGD, methods.TRADES, methods.HeldTRADES, methods.MART, methods.ALP, methods.LLR)
WEIGHTS: dict[type[Method], tuple[str, ...]] = {
    methods.TRADES: ("beta", "start"),
    methods.HeldTRADES: ("beta",),
    methods.MART: ("beta",),
    methods.ALP: ("weight",),
    methods.VAT: ("weight",),
    methods.CURE: ("h", "weight"),
    methods.LLR: ("weight", "slope_weight"),
    methods.AWP: ("gamma",),
}


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def loss_of(method: Method, model: nn.Module, x: Tensor, labels: Tensor, **ball: object) -> Tensor:
    return method.loss(model, x, labels, ball={**BALL, **ball}, generator=seed())


def sound() -> tuple[nn.Module, Tensor, Tensor]:
    """The fragile model without dropout, so that nothing may draw from the global generator."""
    model, x, labels = fragile()
    model.layers[3] = nn.Identity()
    return model, x, labels


def batches_seen(model: nn.Module) -> list[int]:
    return [int(model.layers[i].num_batches_tracked) for i in (1, 5)]


# --- settings that are refused ----------------------------------------------------------------------------------------

NOT_NEGATIVE = "`{}` should be finite and not negative. Found {!r}."
REFUSED: list[tuple[type[Method], str, object, str]] = [
    *((kind, "steps", 0, "`steps` should be a positive integer. Found 0.") for kind in STEPPING),
    *((kind, "steps", 2.5, "`steps` should be a positive integer. Found 2.5.") for kind in STEPPING),
    *((kind, "step_size", -1, NOT_NEGATIVE.format("step_size", -1)) for kind in (methods.RSFGSM, *STEPPING)),
    *(
        (
            kind,
            "gradient_dtype",
            dtype,
            f"`gradient_dtype` should be a floating-point torch.dtype, or None. Found {dtype!r}.",
        )
        for kind in STEPPING
        for dtype in (torch.int8, "bfloat16")
    ),
    *(
        (kind, name, value, NOT_NEGATIVE.format(name, value))
        for kind, names in WEIGHTS.items()
        for name in names
        for value in ("a", -0.5, float("inf"), float("nan"), None, True)
    ),
    (methods.VAT, "iterations", 0, "`iterations` should be a positive integer. Found 0."),
    (methods.VAT, "xi", 0.0, "`xi` should be positive and finite. Found 0.0."),
    (methods.VAT, "xi", "a", "`xi` should be positive and finite. Found 'a'."),
    (methods.Free, "replays", 0, "`replays` should be a positive integer. Found 0."),
    (
        methods.AWP,
        "method",
        "pgd",
        "`method` should have a loss of its own, at which the weights are perturbed. Found str.",
    ),
]


@each(
    ("kind", "name", "value", "message"), REFUSED, ids=[f"{kind.__name__}-{name}-{v}" for kind, name, v, _ in REFUSED]
)
def test_settings_are_refused_where_they_are_made(kind: type[Method], name: str, value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        kind(**{name: value})
    assert str(error.value) == message


# --- batch normalisation in training mode -----------------------------------------------------------------------------


def normalised(momentum: float = 0.1) -> tuple[nn.Module, Tensor, Tensor]:
    """A smooth model with batch normalisation, whose running statistics are not those of the batch."""
    generator = seed(3)
    norm = nn.BatchNorm1d(5, momentum=momentum)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        norm.running_mean.copy_(torch.randn(5, generator=generator, dtype=torch.float64))
        norm.running_var.copy_(0.5 + torch.rand(5, generator=generator, dtype=torch.float64))
    x = 0.3 + 0.4 * torch.rand(6, 4, generator=generator, dtype=torch.float64)
    return model, x, torch.tensor([0, 1, 2, 0, 1, 1])


NORMALISED: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], Tensor], tuple[Block, ...]]] = {
    "cure": (
        lambda model, x, labels: cure_loss(model, x, labels, h=0.2, weight=4.0, norm="l2"),
        (CURVATURE_DIRECTION,),
    ),
    "llr": (
        lambda model, x, labels: llr_loss(
            model, x, labels, attack=partial(linearity_pgd, epsilon=0.2, norm="l2", steps=3)
        ),
        (EXAMPLE,),
    ),
    "vat": (lambda model, x, labels: vat_loss(model, x, epsilon=0.2), (VIRTUAL_CLEAN, VIRTUAL_DIRECTION)),
}


def opening(blocks: tuple[Block, ...], is_open: bool) -> contextlib.AbstractContextManager[object]:
    return unblock(*blocks) if is_open else contextlib.nullcontext()


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("momentum", [0.0, 0.1])
def test_open_gradients_through_batch_normalisation_are_finite_differences(name: str, momentum: float) -> None:
    """Running statistics are constants: where they move, what comes before them moves the values by them, too."""
    loss, blocks = NORMALISED[name]
    model, x, labels = normalised(momentum)
    parameters = dict(model.named_parameters() if not momentum else model[3].named_parameters())
    with unblock(*blocks):
        found = torch.autograd.grad(loss(model, x, labels), list(parameters.values()))
    for (key, parameter), gradient in zip(parameters.items(), found, strict=True):
        expected = torch.empty_like(gradient)
        for place in range(parameter.numel()):
            values = []
            for step in (1e-5, -1e-5):
                other, _, _ = normalised(momentum)
                with torch.no_grad():
                    dict((other if not momentum else other[3]).named_parameters())[key].view(-1)[place] += step
                values.append(loss(other, x, labels).item())
            expected.view(-1)[place] = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_open", [False, True], ids=["blocked", "open"])
@pytest.mark.parametrize("name", NORMALISED)
def test_losses_of_two_batches_are_differentiated_together_as_one_by_one(name: str, is_open: bool) -> None:
    """A training pass moves the running statistics, which the losses before it were taken with."""
    loss, blocks = NORMALISED[name]
    (model, x, labels), (other, _, _) = normalised(), normalised()
    with opening(blocks, is_open):
        (loss(model, x, labels) + loss(model, x.square(), labels)).backward()
        for inputs in (x, x.square()):
            loss(other, inputs, labels).backward()
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-12, atol=1e-12)


# --- nothing is touched but what the training forward pass touches ------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_one_loss_is_one_batch_for_batch_normalisation(name: str) -> None:
    """The attack, the direction, the gradients by the input and the perturbed weights leave no trace in it."""
    model, x, labels = sound()
    loss_of(METHODS[name](), model, x, labels)
    assert batches_seen(model) == [0, 1]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["recording", "no_grad"])
@pytest.mark.parametrize("name", METHODS)
def test_loss_leaves_the_rest_as_it_was(name: str, mode: Callable[[], torch.enable_grad]) -> None:
    model, x, labels = sound()
    model.layers[5].track_running_stats = False
    before = snapshot(model, x, labels)
    with mode():
        value = loss_of(METHODS[name](), model, x, labels)
    assert all(map(torch.equal, snapshot(model, x, labels), before))
    assert x.grad is None
    assert value.shape == ()
    assert value.isfinite()


@pytest.mark.parametrize("name", METHODS)
def test_loss_leaves_no_trace_wherever_the_model_breaks(name: str) -> None:
    model, x, labels = sound()
    model.layers[5].track_running_stats = False
    before = snapshot(model, x, labels)
    for calls in range(100):
        model.calls_left = calls
        try:
            loss_of(METHODS[name](), model, x, labels)
        except FloatingPointError:
            assert all(map(torch.equal, snapshot(model, x, labels), before))
        else:
            break
    assert 0 < calls < 100


@pytest.mark.parametrize("name", ["trades", "mart", "alp", "vat"])
def test_running_statistics_are_those_of_clean_inputs_and_examples_together(name: str) -> None:
    method = METHODS[name]()
    (model, x, labels), (other, _, _) = sound(), sound()
    other.load_state_dict(model.state_dict())
    loss_of(method, model, x, labels)
    example = method.example(other, x, labels, ball=BALL, generator=seed())
    other(torch.cat([x, example]))
    assert all(map(torch.equal, model.buffers(), other.buffers()))


@pytest.mark.parametrize("name", ["cure", "llr", "standard"])
def test_running_statistics_are_those_of_the_clean_inputs(name: str) -> None:
    (model, x, labels), (other, _, _) = sound(), sound()
    other.load_state_dict(model.state_dict())
    loss_of(METHODS[name](), model, x, labels).backward()
    other(x)
    assert all(map(torch.equal, model.buffers(), other.buffers()))


def test_running_statistics_are_not_those_of_perturbed_weights() -> None:
    (model, x, labels), (other, _, _) = sound(), sound()
    other.load_state_dict(model.state_dict())
    loss_of(AWP(PGD(), gamma=0.5), model, x, labels).backward()
    loss_of(PGD(), other, x, labels)
    assert all(map(torch.equal, model.buffers(), other.buffers()))


# --- methods are the functions with their settings ----------------------------------------------------------------


def small() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        return model, torch.rand(7, 6, dtype=torch.float64), torch.arange(7) % 3


def functions() -> dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]]:
    ascent = {**BALL, "steps": 10, "generator": seed()}
    entropy = lambda model, x, labels: F.cross_entropy(model(x), labels)  # noqa: E731

    def smooth(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return entropy(model, x, labels) + vat_loss(model, x, **BALL)

    def worst_weights(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        example = pgd(model, x, labels, **ascent)
        return awp_loss(model, lambda model: F.cross_entropy(model(example), labels), gamma=5e-3)

    return {
        "standard": entropy,
        "fgsm": partial(adversarial_loss, attack=partial(fgsm, **BALL)),
        "rs_fgsm": partial(adversarial_loss, attack=partial(rs_fgsm, **BALL, generator=seed())),
        "pgd": partial(adversarial_loss, attack=partial(pgd, **ascent)),
        "trades": partial(trades_loss, attack=partial(nearby_pgd, **ascent)),
        "held_trades": partial(held_trades_loss, attack=partial(nearby_pgd, **ascent)),
        "mart": partial(mart_loss, attack=partial(pgd, **ascent)),
        "alp": partial(alp_loss, weight=0.5, attack=partial(pgd, **ascent)),
        "vat": smooth,
        "cure": partial(cure_loss, h=0.1, weight=4.0),
        "llr": partial(llr_loss, attack=partial(linearity_pgd, **ascent)),
        "free": entropy,
        "awp": worst_weights,
    }


@pytest.mark.parametrize("name", METHODS)
def test_method_is_the_function_with_its_gradient(name: str) -> None:
    model, x, labels = small()
    found, expected = loss_of(METHODS[name](), model, x, labels), functions()[name](model, x, labels)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_every_method_takes_every_norm_and_a_radius_for_each_sample(name: str, norm: str) -> None:
    model, x, labels = small()
    epsilon = torch.linspace(0, 0.3, 7)
    together = loss_of(METHODS[name](), model, x, labels, norm=norm, epsilon=epsilon)
    assert together.isfinite()
    if name not in ("rs_fgsm", "pgd", "trades", "held_trades", "mart", "alp", "llr", "awp"):  # these draw their starts
        alone = [
            loss_of(METHODS[name](), model, x[i : i + 1], labels[i : i + 1], norm=norm, epsilon=epsilon[i])
            for i in range(7)
        ]
        torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-12, atol=0)


def test_every_name_is_listed_once() -> None:
    classes = {value for value in vars(methods).values() if isinstance(value, type) and issubclass(value, Method)}
    public = {cls for cls in classes if cls.__name__[0] != "_" and cls is not Method}
    assert {type(make()) for make in METHODS.values()} == public
    assert set(functions()) == set(METHODS)


def test_equal_settings_are_equal_methods() -> None:
    assert PGD(steps=3) == PGD(steps=3) != PGD(steps=4)
    assert repr(AWP(PGD(steps=3))).startswith("AWP(method=PGD(steps=3")


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"standard"}))
@pytest.mark.parametrize(("ball", "found"), [(None, "NoneType"), ({"norm": "l2"}, "no `epsilon`")])
def test_ball_of_a_method_is_a_mapping_with_a_radius(name, ball, found):
    model, x, labels = nn.Linear(3, 2), torch.rand(2, 3), torch.tensor([0, 1])
    with pytest.raises(
        TypeError, match=f"`ball` should be a mapping with `epsilon`, `norm` and `bounds`. Found {found}"
    ):
        METHODS[name]().step(
            model, x, labels, ball=ball, generator=torch.Generator(), update=lambda loss: None, state={}
        )


@pytest.mark.parametrize("method", [Free(), AWP()], ids=["free", "awp"])
def test_weights_are_perturbed_around_a_loss(method: Method) -> None:
    with pytest.raises(TypeError, match="`method` should have a loss of its own"):
        AWP(method)


# --- virtual adversarial training without labels ------------------------------------------------------------------


def test_samples_without_a_label_count_for_smoothness_only() -> None:
    model, x, labels = small()
    some = torch.where(torch.arange(7) < 3, labels, -1)
    smooth = vat_loss(model, x, **BALL)
    expected = F.cross_entropy(model(x[:3]), labels[:3]) + 0.7 * smooth
    torch.testing.assert_close(loss_of(VAT(weight=0.7), model, x, some), expected, rtol=1e-12, atol=0)
    none = loss_of(VAT(weight=0.7), model, x, torch.full_like(labels, -1))
    torch.testing.assert_close(none, 0.7 * smooth, rtol=1e-12, atol=0)
    assert torch.autograd.grad(none, model[0].weight)[0].isfinite().all()


def test_power_iteration_is_a_setting() -> None:
    model, x, labels = small()
    towards = partial(power_direction, iterations=2, xi=0.1, generator=seed())
    expected = F.cross_entropy(model(x), labels) + vat_loss(model, x, **BALL, direction=towards)
    torch.testing.assert_close(loss_of(VAT(iterations=2, xi=0.1), model, x, labels), expected, rtol=1e-12, atol=0)


# --- perturbed weights -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_steps_leave_every_bit_of_the_weights() -> None:
    """To add a perturbation in place and subtract it again would have changed most of them by now."""
    model, x, labels = small()
    model = model.float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(1000):
        awp_loss(model, lambda model: F.cross_entropy(model(x.float()), labels), gamma=0.01).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    drifted = before["0.weight"].clone()
    for _ in range(1000):
        step = 0.01 * torch.randn(drifted.shape, generator=seed())
        drifted.add_(step).sub_(step)
    assert not torch.equal(drifted, before["0.weight"])


def test_perturbation_raises_the_loss_within_its_radius() -> None:
    model, x, labels = small()
    model[2].weight.requires_grad_(False)
    loss = lambda model: F.cross_entropy(model(x), labels)  # noqa: E731
    found = weight_perturbation(model, loss, gamma=0.05)
    assert list(found) == ["0.weight"]  # no biases, and nothing that is not trained
    step = found["0.weight"] - model[0].weight
    torch.testing.assert_close(step.norm(), 0.05 * model[0].weight.norm(), rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(loss(model), model[0].weight)
    assert F.cosine_similarity(step.flatten(), slope.flatten(), dim=0) > 1 - 1e-12
    assert loss(reweighted(model, found)) > loss(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_weights_to_perturb_has_its_plain_loss() -> None:
    x, labels = torch.randn(6, 3, generator=seed(), dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 1])
    models = [nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).double() for _ in range(2)]
    losses = []
    for model, method in zip(models, (AWP(PGD(), gamma=0.5), PGD()), strict=True):
        torch.manual_seed(1)
        losses.append(loss_of(method, model, x, labels, bounds=None))
        losses[-1].backward()
    assert losses[0] == losses[1]
    assert all(map(torch.equal, models[0].buffers(), models[1].buffers()))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*(m.parameters() for m in models), strict=True))
    assert weight_perturbation(models[0], lambda model: model(x).sum(), gamma=0.1) == {}


def test_weights_that_the_loss_does_not_reach_stay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    found = weight_perturbation(model, lambda model: model["used"](torch.ones(1, 3)).sum(), gamma=0.1)
    assert torch.equal(found["unused.weight"], model["unused"].weight)
    assert not torch.equal(found["used.weight"], model["used"].weight)


def test_both_passes_draw_the_same_dropout_masks() -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    x = torch.rand(4, 6)
    state = torch.get_rng_state()
    plain = model(x).sum()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.testing.assert_close(awp_loss(model, lambda model: model(x).sum(), gamma=0.0), plain)
    assert torch.equal(torch.get_rng_state(), after)


def test_tied_weights_are_perturbed_together() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    x = torch.rand(3, 4)
    weights = weight_perturbation(model, lambda model: model(x).square().sum(), gamma=0.1)
    assert list(weights) == ["0.weight"]
    w = weights["0.weight"]
    torch.testing.assert_close(reweighted(model, weights)(x), torch.tanh(x @ w.T) @ w.T)


# --- free training -----------------------------------------------------------------------------------------------


def updater(model: nn.Module, losses: list[Tensor], *, learning_rate: float = 0.1) -> Callable[[Tensor], None]:
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)

    def update(loss: Tensor) -> None:
        losses.append(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return update


def test_free_training_is_the_loop_of_the_paper() -> None:
    (model, x, labels), (other, _, _) = small(), small()
    losses: list[Tensor] = []
    update, state = updater(model, losses), {}
    for batch in (slice(0, 4), slice(4, 7), slice(0, 4)):
        arguments = {"ball": BALL, "generator": seed(), "update": update, "state": state}
        loss, state = Free(replays=3).step(model, x[batch], labels[batch], **arguments)
        assert loss is losses[-1]
    assert len(losses) == 9

    delta = torch.zeros(4, 6, dtype=torch.float64)
    for batch in (slice(0, 4), slice(4, 7), slice(0, 4)):
        for _ in range(3):
            clean, rows = x[batch], len(x[batch])
            point = (clean + delta[:rows]).clamp(0, 1).requires_grad_()
            gradients = torch.autograd.grad(F.cross_entropy(other(point), labels[batch]), [point, *other.parameters()])
            moved = (point.detach() + 0.1 * gradients[0].sign() - clean).clamp(-0.1, 0.1)
            delta = torch.cat([(clean + moved).clamp(0, 1) - clean, delta[rows:]])
            with torch.no_grad():
                for parameter, gradient in zip(other.parameters(), gradients[1:], strict=True):
                    parameter -= 0.1 * gradient
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state["perturbation"], delta, rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_replayed_examples_lie_in_ball_and_box(norm: str) -> None:
    model, x, labels = small()
    x, model = x.float(), model.float()
    perturbation = torch.zeros_like(x)
    for _ in range(4):
        replay = free_loss(model, x, labels, perturbation=perturbation, epsilon=0.2, norm=norm)
        replay.loss.backward()
        perturbation = replay.next_perturbation()
        order = {"linf": torch.inf, "l2": 2, "l1": 1}[norm]
        assert torch.linalg.vector_norm(replay.example.double() - x.double(), order, 1).max() <= 0.2
        assert 0 <= replay.example.min() <= replay.example.max() <= 1
        assert not perturbation.requires_grad
    assert torch.linalg.vector_norm(perturbation.double(), order, 1).min() > 0.15


def test_a_replay_is_one_pass_for_batch_normalisation() -> None:
    model, x, labels = sound()
    arguments = {"ball": BALL, "generator": seed(), "update": updater(model, []), "state": {}}
    Free(replays=4).step(model, x, labels, **arguments)
    assert batches_seen(model) == [0, 4]


def test_larger_batches_add_rows_to_the_perturbation() -> None:
    model, x, labels = small()
    arguments = {"ball": BALL, "generator": seed(), "update": updater(model, [])}
    _, state = Free(replays=1).step(model, x[:2], labels[:2], **arguments, state={})
    assert state["perturbation"].shape == (2, 6)
    _, state = Free(replays=1).step(model, x, labels, **arguments, state=state)
    assert state["perturbation"].shape == (7, 6)


# --- what it does to a model -------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, in which a seed trains the same model on every machine."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.data), generator=seed())
    x, labels = torch.from_numpy(bunch.data)[order] / 16, torch.from_numpy(bunch.target)[order]
    return x[:1200], labels[:1200], x[1200:], labels[1200:]


def trained(method: Method, *, epochs: int, n_labelled: int = 1200, **ball: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64, dtype=F64), nn.ReLU(), nn.Linear(64, 10, dtype=F64))
    x, labels, _, _ = digits()
    labels = torch.where(torch.arange(1200) < n_labelled, labels, -1)
    optimizer, state, generator = torch.optim.Adam(model.parameters(), 5e-3), {}, seed(2)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def batches() -> Iterator[Tensor]:
        for _ in range(epochs):
            yield from torch.randperm(1200, generator=generator).split(120)

    for rows in batches():
        arguments = {"ball": {**BALL, **ball}, "generator": generator, "update": update, "state": state}
        _, state = method.step(model, x[rows], labels[rows], **arguments)
    return model


@pytest.mark.slow
def test_smoothness_learns_from_samples_without_a_label() -> None:
    """Forty labels, and 1160 digits without one."""
    _, _, x, labels = digits()
    accuracy = {}
    for weight in (0.0, 1.0):
        model = trained(VAT(weight=weight), epochs=30, n_labelled=40, norm="l2", epsilon=0.5)
        accuracy[weight] = (model(x).argmax(1) == labels).double().mean().item()
    assert accuracy[1.0] > accuracy[0.0] + 0.03


# --- elsewhere ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_methods_are_the_same_on_every_device(name: str) -> None:
    """Also what is drawn: starts come from the generator's device."""
    model, x, labels = small()
    here = loss_of(METHODS[name](), model, x, labels)
    gradients = torch.autograd.grad(here, list(model.parameters()))
    model = model.to(ACCELERATOR)
    there = loss_of(METHODS[name](), model, x.to(ACCELERATOR), labels.to(ACCELERATOR))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-10, atol=0)
    for one, other in zip(torch.autograd.grad(there, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-8, atol=1e-11)
