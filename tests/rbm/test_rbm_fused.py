"""The fused trainer with all its options is plain descent on the blocked surrogates, for all units."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from values import seeded

from tests.contract import relative_error
from toolkit import _precision
from toolkit.rbm import (
    RBM,
    FusedTrainer,
    Offsets,
    centered,
    centering_offsets,
    updated_fast_weights,
)
from toolkit.rbm.training import fused

UNITS = {
    "bernoulli": {},
    "gaussian": {"visible": "gaussian"},
    "categorical": {"visible": "categorical", "categories": 3},
    "rectified": {"hidden": "rectified"},
    "gaussian-rectified": {"visible": "gaussian", "hidden": "rectified"},
}
BETAS = torch.tensor([0.3, 0.6, 1.0], dtype=torch.float64)
METHODS = {
    "cd": {},
    "pcd": {"chains": 4},
    "fast": {"chains": 4, "fast_rate": 0.2},
    "tempering": {"chains": 4, "inverse_temperatures": BETAS},
}


def _rbm(units: str, n_visible: int = 4, n_hidden: int = 3) -> RBM:
    rbm = RBM(n_visible, n_hidden, dtype=torch.float64, generator=seeded(0), **UNITS[units])
    with torch.no_grad():
        for parameter in rbm.parameters():
            # Weights of a machine of two unbounded layers must be small, or it has no distribution.
            parameter.normal_(generator=seeded(parameter.numel())).mul_(0.2 if units == "gaussian-rectified" else 0.5)
    return rbm


def _data(rbm: RBM, n: int, seed: int) -> Tensor:
    x = torch.randn(n, rbm.n_columns, generator=seeded(seed), dtype=torch.float64)
    return rbm.joint.visible.sample(x, seeded(seed)).detach()


def _options(rbm: RBM, method: str) -> dict:
    options = dict(METHODS[method])
    if "chains" in options:
        shape = (*([len(BETAS)] if method == "tempering" else []), options["chains"], rbm.n_hidden)
        options["chains"] = torch.randint(2, shape, generator=seeded(3)).double()
    return options


@dataclass
class Twin:
    """The specification: draws from layers, gradients by autograd, an update by its definition."""

    rbm: RBM
    steps: int
    generator: torch.Generator
    chains: Tensor | None = None
    inverse_temperatures: Tensor | None = None
    reference: Tensor | None = None
    fast_rate: float | None = None
    offset_rate: float | None = None
    weight_decay: float = 0.0
    offsets: Offsets | None = None
    fast: dict[str, Tensor] = field(default_factory=dict)
    sweeps: int = 0

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        parameters = dict(self.rbm.named_parameters())
        with torch.no_grad():
            negative = self._draw(data)
        machine = self.rbm.joint
        if self.offset_rate is not None:
            self.offsets = centering_offsets(self.rbm, data, previous=self.offsets, rate=self.offset_rate)
            machine = centered(self.rbm, self.offsets)
        loss = machine.free_energy(data).mean() - machine.free_energy(negative).mean()
        # Weights decay in the coordinates of the update, in which the centred biases do not.
        loss = loss + self.weight_decay / 2 * (self.rbm.weights**2).sum()
        if self.offsets is not None:
            pull = self.weight_decay * self.rbm.weights.detach()
            loss = loss - (pull @ self.offsets.hidden) @ self.rbm.visible_bias
            loss = loss - (pull.mT @ self.offsets.visible) @ self.rbm.hidden_bias
        found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        gradients = dict(zip(parameters, found, strict=True))
        if self.fast_rate is not None:
            own = gradients | {"weights": gradients["weights"] - self.weight_decay * self.rbm.weights.detach()}
            if self.offsets is not None:
                own["visible_bias"] = own["visible_bias"] + pull @ self.offsets.hidden
                own["hidden_bias"] = own["hidden_bias"] + pull.mT @ self.offsets.visible
            fast = self.fast or {name: torch.zeros_like(value) for name, value in parameters.items()}
            self.fast = updated_fast_weights(fast, own, learning_rate=self.fast_rate)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(gradients[name], alpha=learning_rate)

    def _draw(self, data: Tensor) -> Tensor:
        joint = drawn = self.rbm.joint
        if self.fast:
            drawn = joint.shifted(self.fast)
        if self.inverse_temperatures is not None:
            drawn = joint.annealed(self.inverse_temperatures, self.reference)
        hidden = drawn.sample_hidden(data, self.generator) if self.chains is None else self.chains
        for step in range(self.steps):
            visible = drawn.sample_visible(hidden, self.generator)
            if self.inverse_temperatures is not None:
                visible = self._swap(visible, joint.annealed_difference(visible, hidden, self.reference))
            if self.chains is not None or step < self.steps - 1:
                hidden = drawn.sample_hidden(visible, self.generator)
        if self.chains is not None:
            self.chains = hidden
        return visible if self.inverse_temperatures is None else visible[-1]

    def _swap(self, visible: Tensor, difference: Tensor) -> Tensor:
        pairs = list(range(self.sweeps % 2, len(difference) - 1, 2))
        self.sweeps += 1
        uniform = torch.rand(len(pairs), visible.shape[1], generator=self.generator, dtype=torch.float32)
        visible = visible.clone()
        for row, (pair, chain) in zip(
            uniform.flatten().tolist(), itertools.product(pairs, range(visible.shape[1])), strict=True
        ):
            betas, differences = self.inverse_temperatures[pair : pair + 2], difference[pair : pair + 2, chain]
            if row < ((betas[0] - betas[1]) * (differences[0] - differences[1])).exp():
                visible[[pair, pair + 1], chain] = visible[[pair + 1, pair], chain]
        return visible


def _pair(units: str, method: str, steps: int, **options) -> tuple[FusedTrainer, Twin]:
    rbm, twin = _rbm(units), _rbm(units)
    options |= _options(rbm, method)
    trainer = FusedTrainer(rbm, batch_size=5, steps=steps, generator=seeded(1), **options)
    return trainer, Twin(twin, steps, seeded(1), **options)


@pytest.mark.portable
@pytest.mark.parametrize("centred", [{}, {"offset_rate": 0.3, "weight_decay": 0.1}], ids=["plain", "centred-decay"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("units", UNITS)
def test_fused_training_is_descent_on_the_surrogate(units, method, steps, centred):
    trainer, twin = _pair(units, method, steps, **centred)
    for n, seed in ((5, 10), (5, 11), (2, 12)):  # the last batch is smaller
        data = _data(trainer.rbm, n, seed)
        trainer.step(data, learning_rate=0.2)
        twin.step(data, learning_rate=0.2)
        assert all(parameter.isfinite().all() for parameter in twin.rbm.parameters())
        assert relative_error(dict(trainer.rbm.named_parameters()), dict(twin.rbm.named_parameters())) < 1e-12
        if trainer.chains is not None:
            assert torch.equal(trainer.chains, twin.chains)


@pytest.mark.parametrize("units", ["bernoulli", "categorical"])
def test_tempering_from_a_reference_is_descent_on_the_surrogate(units):
    reference = torch.linspace(-1, 1, _rbm(units).n_columns, dtype=torch.float64)
    trainer, twin = _pair(units, "tempering", 2, reference=reference)
    for seed in (10, 11, 12):
        data = _data(trainer.rbm, 5, seed)  # once: the data follow the biases, which a step moves
        for one in (trainer, twin):
            one.step(data, learning_rate=0.2)
        assert relative_error(dict(trainer.rbm.named_parameters()), dict(twin.rbm.named_parameters())) < 1e-12


@pytest.mark.parametrize("betas", [[0.5, 1.0], [0.1, 0.4, 0.7, 1.0]], ids=len)
@pytest.mark.parametrize("units", ["bernoulli", "gaussian"])
def test_even_and_odd_pairs_are_swapped_in_turn(units, betas):
    """Of two temperatures there is no odd pair."""
    betas = torch.tensor(betas, dtype=torch.float64)
    chains = torch.randint(2, (4, 3), generator=seeded(3)).double()
    options = {"inverse_temperatures": betas, "chains": chains}
    trainer = FusedTrainer(_rbm(units), batch_size=5, steps=3, generator=seeded(1), **options)
    twin = Twin(_rbm(units), 3, seeded(1), **options | {"chains": chains.expand(len(betas), 4, 3)})
    for seed in (10, 11):
        data = _data(trainer.rbm, 5, seed)
        trainer.step(data, learning_rate=0.2)
        twin.step(data, learning_rate=0.2)
    assert relative_error(dict(trainer.rbm.named_parameters()), dict(twin.rbm.named_parameters())) < 1e-12


@pytest.mark.parametrize("units", ["bernoulli", "gaussian"])
def test_one_temperature_is_persistent_contrastive_divergence(units):
    plain, tempered = _rbm(units), _rbm(units)
    chains = torch.zeros(4, 3, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    trainers = [
        FusedTrainer(plain, batch_size=5, steps=2, chains=chains, generator=seeded(1)),
        FusedTrainer(tempered, batch_size=5, steps=2, chains=chains, inverse_temperatures=one, generator=seeded(1)),
    ]
    batches = [_data(plain, 5, seed) for seed in (1, 2)]
    for trainer, batch in itertools.product(trainers, batches):
        trainer.step(batch, learning_rate=0.1)
    assert relative_error(dict(plain.named_parameters()), dict(tempered.named_parameters())) < 1e-14
    assert trainers[1].chains.shape == (1, 4, 3)
    assert trainers[1].swap_rates is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("units", ["bernoulli", "gaussian"])
def test_a_loaded_state_goes_on_bit_for_bit(units, method):
    options = {"offset_rate": 0.3, "weight_decay": 0.1}
    trainer, _ = _pair(units, method, 1, **options)
    for seed in (10, 11, 12):
        trainer.step(_data(trainer.rbm, 5, seed), learning_rate=0.2)
    state, parameters = trainer.state_dict(), {k: v.clone() for k, v in trainer.rbm.state_dict().items()}
    trainer.step(_data(trainer.rbm, 5, 13), learning_rate=0.2)

    other, _ = _pair(units, method, 1, **options)
    other.rbm.load_state_dict(parameters)
    other.load_state_dict(state)
    other.step(_data(other.rbm, 5, 13), learning_rate=0.2)
    for name, parameter in trainer.rbm.named_parameters():
        assert torch.equal(parameter, dict(other.rbm.named_parameters())[name]), name
    for name, value in trainer.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_state_of_other_options_is_refused():
    trainer, _ = _pair("bernoulli", "pcd", 1)
    other, _ = _pair("bernoulli", "pcd", 1, offset_rate=0.1)
    with pytest.raises(ValueError, match=r"same options\. Found others: \['centred', 'hidden_offset'"):
        trainer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_low_precision_products_draw_from_rounded_weights(method):
    """Weights that bfloat16 holds, and biases that are added in full: the draws are the same, bit for bit."""
    options = _options(_rbm("bernoulli"), method)
    machines = []
    for dtype in (None, torch.bfloat16):
        rbm = _rbm("bernoulli")
        with torch.no_grad():
            rbm.weights.mul_(4).round_().div_(4)  # sums of few quarters are exact in bfloat16
        trainer = FusedTrainer(rbm, batch_size=5, steps=2, product_dtype=dtype, generator=seeded(1), **options)
        data = _data(rbm, 5, 10).round()
        trainer.step(data, learning_rate=1e-300)
        trainer.step(data, learning_rate=0.1)
        machines.append(rbm)
    assert relative_error(*(dict(rbm.named_parameters()) for rbm in machines)) < 1e-14


def test_low_precision_training_learns_as_much():
    data, learned = torch.eye(6).repeat(10, 1), []
    for dtype in (None, torch.bfloat16):
        rbm = RBM(6, 8, generator=seeded(0))
        chains, draws = torch.zeros(100, 8), seeded(1)
        trainer = FusedTrainer(
            rbm, batch_size=60, steps=1, chains=chains, offset_rate=0.1, product_dtype=dtype, generator=draws
        )
        for step in range(1000):
            trainer.step(data, learning_rate=0.3 * (1 - step / 1000))
        assert rbm.weights.dtype == torch.float32
        learned.append(rbm.log_likelihood(data).mean().item())
    assert learned[0] > -2.8  # -4.16 at first
    assert abs(learned[1] - learned[0]) < 0.01


def test_swap_rates_are_counted():
    trainer, _ = _pair("bernoulli", "tempering", 4)
    assert trainer.swap_rates.shape == (2,)
    for seed in range(50):
        trainer.step(_data(trainer.rbm, 5, seed), learning_rate=1e-3)
    assert ((trainer.swap_rates > 0.3) & (trainer.swap_rates < 1)).all()
    assert _pair("bernoulli", "pcd", 1)[0].swap_rates is None


CHAINS = torch.zeros(4, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fast_rate": 0.1}, r"`inverse_temperatures` and `fast_rate` should come with `chains`"),
        ({"fast_rate": 0.0, "chains": CHAINS}, r"`fast_rate` should be positive and finite\. Found 0\.0"),
        ({"fast_rate": math.inf, "chains": CHAINS}, r"`fast_rate` should be positive and finite\. Found inf"),
        ({"chains": CHAINS + 7}, r"`chains` should be between 0 and 1\. Found 7\.0"),
        ({"chains": CHAINS + math.nan}, r"`chains` should be finite\. Found nan"),
        ({"chains": CHAINS, "reference": CHAINS[0]}, r"`reference` should come with `inverse_temperatures`"),
        (
            {"chains": CHAINS, "inverse_temperatures": BETAS, "reference": CHAINS[0, :1]},
            r"`reference` should have shape \(4,\)\. Found \(1,\)",
        ),
        (
            {"chains": CHAINS, "inverse_temperatures": BETAS, "reference": torch.full((4,), math.nan)},
            r"`reference` should be finite",
        ),
        (
            {"product_dtype": torch.int8},
            r"`product_dtype` should be a floating-point type, or \"auto\"\. Found torch\.int8",
        ),
        ({"fast_rate": 0.1, "chains": CHAINS, "inverse_temperatures": BETAS}, r"should not both be given"),
        ({"offset_rate": 1.5}, r"`offset_rate` should be above 0 and at most 1\. Found 1\.5"),
        ({"weight_decay": -1.0}, r"`weight_decay` should be finite and not negative\. Found -1\.0"),
        ({"weight_decay": math.inf}, r"`weight_decay` should be finite and not negative\. Found inf"),
        ({"weight_decay": "a"}, r"`weight_decay` should be finite and not negative\. Found 'a'"),
        ({"chains": CHAINS, "inverse_temperatures": BETAS.flip(0)}, r"should increase from 0 or more to 1\. Found \[1"),
        ({"chains": CHAINS, "inverse_temperatures": BETAS[:2]}, r"should increase from 0 or more to 1\. Found \[0\.3"),
        ({"chains": CHAINS.expand(2, 4, 3), "inverse_temperatures": BETAS}, r"shape \(M, 3\) or \(3, M, 3\), M > 0"),
    ],
)
def test_a_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        FusedTrainer(_rbm("bernoulli"), batch_size=5, steps=1, **options)


def test_inverse_temperatures_are_numbers():
    with pytest.raises(TypeError, match=r"`inverse_temperatures` should be a tensor or a list of numbers\. Found str"):
        FusedTrainer(_rbm("bernoulli"), batch_size=5, steps=1, chains=CHAINS, inverse_temperatures="0, 1")


def test_arrays_are_no_data_of_a_step():
    trainer = FusedTrainer(_rbm("bernoulli"), batch_size=5, steps=1, inverse_temperatures=[0, 1], chains=CHAINS.numpy())
    with pytest.raises(TypeError, match=r"`data` should be a tensor\. Found ndarray"):
        trainer.step(CHAINS.numpy(), learning_rate=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rare_ones_are_drawn_as_rarely_in_half_precision(dtype):
    """Uniform numbers in bfloat16 are 0 once in 256 times: 3e-4 would be drawn seven times too often."""
    rbm = RBM(1000, 1, dtype=dtype)
    with torch.no_grad():
        rbm.weights.zero_()
        rbm.visible_bias.fill_(-8)
    rate = torch.sigmoid(torch.tensor(-8.0)).item()
    trainer = FusedTrainer(rbm, batch_size=400, steps=1, generator=seeded(1))
    with torch.no_grad():
        phases = trainer._kernel.phases(torch.zeros(400, 1000), None, trainer.generator)
    drawn = phases.visible[: phases.n_negative].double().mean().item()
    assert abs(drawn - rate) < 5 * (rate / 400_000) ** 0.5


def test_low_precision_is_for_bernoulli_units():
    with pytest.raises(ValueError, match=r"`product_dtype` should be left out unless all units are Bernoulli"):
        FusedTrainer(_rbm("gaussian"), batch_size=5, steps=1, product_dtype=torch.bfloat16)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_generator_trains_nearby_machines_in_every_dtype(method):
    """Machines start alike and draw the same numbers, so they differ by rounding until that decides a draw."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        rbm = RBM(12, 5, dtype=dtype, generator=seeded(0))
        trainer = FusedTrainer(rbm, batch_size=6, steps=1, generator=seeded(1), **_options(rbm, method))
        for seed in range(20):
            data = torch.randint(2, (6, 12), generator=seeded(seed))
            trainer.step(data, learning_rate=0.3)
        found[dtype] = dict(rbm.named_parameters())
    for name, value in found[torch.float64].items():
        torch.testing.assert_close(found[torch.float32][name].double(), value, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("n_hidden", "inside"), [(5, 1), (12_000, 2)], ids=["small", "large"])
def test_a_small_machine_takes_one_thread_and_gives_the_others_back(n_hidden, inside, monkeypatch):
    rbm = RBM(100, n_hidden, generator=seeded(0))
    trainer = FusedTrainer(rbm, batch_size=4, steps=1, chains=torch.zeros(4, n_hidden), generator=seeded(1))
    before, seen, move = torch.get_num_threads(), [], trainer._kernel.phases

    def phases(*arguments):
        seen.append(torch.get_num_threads())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return move(*arguments)

    monkeypatch.setattr(trainer._kernel, "phases", phases)
    try:
        torch.set_num_threads(2)
        trainer.step(torch.zeros(4, 100), learning_rate=0.1)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(torch.zeros(4, 100), learning_rate=0.1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [inside, inside]


@pytest.mark.parametrize(("faster", "expected"), [(True, torch.bfloat16), (False, None)], ids=["faster", "slower"])
def test_products_that_draw_are_rounded_where_that_is_faster(faster, expected, monkeypatch):
    sizes = []
    monkeypatch.setattr(fused, "bfloat16_is_faster", lambda *size: sizes.append(size) or faster)
    rbm = _rbm("bernoulli")
    trainer = FusedTrainer(
        rbm, batch_size=4, steps=1, chains=torch.zeros(6, 3), product_dtype="auto", generator=seeded(1)
    )
    assert trainer.product_dtype == expected
    assert sizes == [(10, 4, 3, torch.float64, torch.device("cpu"))]
    with pytest.raises(ValueError, match=r"should be a floating-point type, or \"auto\"\. Found 'fast'"):
        FusedTrainer(rbm, batch_size=4, steps=1, product_dtype="fast")


def test_the_faster_precision_is_measured_once(monkeypatch):
    times = iter([1.0, 2.0, 1.0, 1.1])
    monkeypatch.setattr(_precision, "_seconds", lambda run: run() is not None and next(times))
    _precision.bfloat16_is_faster.cache_clear()
    device = torch.device("cpu")
    found = [_precision.bfloat16_is_faster(2, n, 3, torch.float32, device) for n in (4, 4, 5, 4)]
    assert found == [True, True, False, True]
    _precision.bfloat16_is_faster.cache_clear()
    monkeypatch.undo()
    assert isinstance(_precision.bfloat16_is_faster(20, 30, 40, torch.float32, device), bool)
