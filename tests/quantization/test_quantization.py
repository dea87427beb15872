"""Straight-through rounding and finite scalars: values on their grid, and the gradient of the continuous input."""

import math

import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from torch import Tensor
from torch.func import grad, vmap

from toolkit import Block, unblock
from toolkit.gradients import gradcheck
from toolkit.quantization import (
    FINITE_SCALAR,
    ONE_HOT,
    ROUND,
    SIGN,
    TOP_K,
    FiniteScalarQuantizer,
    gumbel_softmax,
    one_hot_ste,
    round_ste,
    sign_ste,
    top_k_ste,
)

X, T, C = (torch.tensor(row, dtype=torch.float64) for row in ([0.3, -1.7, 2.2], [0.5, -1.0, 1.0], [0.7, -0.4, 1.1]))
LOGITS, V = (torch.tensor(row, dtype=torch.float64) for row in ([0.2, -0.5, 0.9], [1.0, -2.0, 0.5]))
Z, LEVELS = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64), (8, 5, 4)


def case(id: str, block: Block, x: Tensor, loss, blocked, opened=torch.zeros_like) -> BlockCase:
    return BlockCase(
        id=f"quantization_{id}",
        block=block,
        parameters=lambda: {"x": x.clone().requires_grad_()},
        loss=lambda parameters: loss(parameters["x"]),
        blocked=lambda parameters: {"x": blocked(parameters["x"].detach())},
        opened=lambda parameters: {"x": opened(parameters["x"].detach())},
    )


def distance(y: Tensor) -> Tensor:
    return 0.5 * (y - T).square().sum()


def noise() -> Tensor:
    """Return the noise that `gumbel_softmax` draws with seed 3."""
    draws = torch.empty(3, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(3))
    return -draws.log()


def relaxed_gradient(logits: Tensor, g: Tensor, tau: float = 0.7) -> Tensor:
    y = torch.softmax((logits + g) / tau, -1)
    return y * (V - y @ V) / tau


def finite_scalar_gradient(z: Tensor) -> Tensor:
    slopes = []
    for value, levels, c in zip(z.tolist(), LEVELS, (1.0, -2.0, 0.5), strict=True):
        height = (levels - 1) * 1.001 / 2
        shift = math.atanh((0.0 if levels % 2 else 0.5) / height)
        slopes.append(c * height * (1 - math.tanh(value + shift) ** 2) / (levels // 2))
    return torch.tensor(slopes, dtype=z.dtype)


def finite_scalar_loss(z: Tensor) -> Tensor:
    codes, _ = FiniteScalarQuantizer(LEVELS)(z)
    return codes @ torch.tensor([1.0, -2.0, 0.5], dtype=z.dtype)


BLOCK_CASES = [
    case("round", ROUND, X, lambda x: distance(round_ste(x)), lambda x: x.round() - T),
    case("sign", SIGN, X, lambda x: sign_ste(x) @ C, lambda x: C * (x.abs() <= 1)),
    case(
        "top_k",
        TOP_K,
        X,
        lambda x: distance(top_k_ste(x, 1)),
        lambda x: torch.tensor([0.0, 0.0, 2.2], dtype=x.dtype) - T,
        lambda x: torch.tensor([0.0, 0.0, 1.2], dtype=x.dtype),
    ),
    case(
        "gumbel",
        ONE_HOT,
        LOGITS,
        lambda x: gumbel_softmax(x, temperature=0.7, generator=torch.Generator().manual_seed(3)) @ V,
        lambda x: relaxed_gradient(x, noise()),
    ),
    case("one_hot", ONE_HOT, LOGITS.softmax(-1), lambda x: one_hot_ste(x) @ V, lambda x: V),
    case("finite_scalar", FINITE_SCALAR, Z, finite_scalar_loss, finite_scalar_gradient),
]
PEER_CASES = {
    "values_on_grids": (
        {"round": X, "sign": X, "top_k": X, "logits": LOGITS, "z": Z},
        {
            "t": T,
            "c": C,
            "v": V,
            "g": noise(),
            "levels": torch.tensor(LEVELS).double(),
            "one": torch.tensor(1.0, dtype=torch.float64),
            "kept": torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
            "chosen": one_hot_ste(torch.softmax((LOGITS + noise()) / 0.7, -1)),
        },
        lambda p, c: (
            distance(round_ste(p["round"]))
            + sign_ste(p["sign"]) @ C
            + distance(top_k_ste(p["top_k"], 1))
            + gumbel_softmax(p["logits"], temperature=0.7, generator=torch.Generator().manual_seed(3)) @ V
            + finite_scalar_loss(p["z"])
        ),
    )
}

FUNCTIONS = {
    "round": round_ste,
    "sign": sign_ste,
    "top_k": lambda x: top_k_ste(x, 2),
    "one_hot": one_hot_ste,
    "finite_scalar": FiniteScalarQuantizer(LEVELS + LEVELS[:2]).double(),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


def value_of(result):
    return result if isinstance(result, Tensor) else result.codes


# --- numbers on paper ------------------------------------------------------------------------------------------------


def gradient(loss, x: Tensor) -> tuple[float, list[float]]:
    x = x.clone().requires_grad_()
    value = loss(x)
    return value.item(), torch.autograd.grad(value, x)[0].tolist()


@pytest.mark.parametrize(
    ("loss", "x", "value", "slopes"),
    [
        (lambda x: distance(round_ste(x)), X, 1.125, [-0.5, -1.0, 1.0]),
        (lambda x: sign_ste(x) @ C, X, 2.2, [0.7, 0.0, 0.0]),
        (lambda x: distance(top_k_ste(x, 1)), X, 1.345, [-0.5, 1.0, 1.2]),
        (
            lambda x: one_hot_ste(torch.softmax((x + x.new_tensor([0.3, 1.4, -0.2])) / 0.7, -1)) @ V,
            LOGITS,
            -2.0,
            [0.5076356397, -0.9514063734, 0.4437707337],
        ),
        (finite_scalar_loss, Z, 2.5, [0.7237869759, -0.6106500324, 0.1251284375]),
    ],
    ids=["round", "sign", "top_k", "gumbel", "finite_scalar"],
)
def test_known_numbers(loss, x, value, slopes):
    found, its_slopes = gradient(loss, x)
    assert found == pytest.approx(value, rel=1e-12)
    assert its_slopes == pytest.approx(slopes, rel=1e-8, abs=1e-12)


def test_an_input_beyond_the_clip_has_no_gradient_and_its_ends_have_one():
    x = torch.tensor([-1.0, 1.0, 1.0 + 1e-9, -2.0], dtype=torch.float64)
    assert gradient(lambda x: sign_ste(x).sum(), x)[1] == [1, 1, 0, 0]


def test_the_sign_of_zero_is_positive():
    assert sign_ste(torch.tensor([0.0, -0.0])).tolist() == [1, 1]


# --- values lie on the grid ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_exactly_on_the_grid(dtype):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(20_000, generator=generator, dtype=torch.float64).to(dtype)
    x = torch.cat([x, torch.tensor([0.0, 0.5, -0.5, 1e-7, 0.49999, 200.0], dtype=dtype)])
    assert torch.equal(round_ste(x), x.round())
    assert set(sign_ste(x).tolist()) == {-1, 1}
    p = torch.softmax(x[: 4 * 5000].view(-1, 4), -1)
    hard = one_hot_ste(p)
    assert torch.equal(hard, torch.nn.functional.one_hot(p.argmax(-1), 4).to(dtype))
    kept = top_k_ste(x.view(-1, 2), 1)
    assert torch.equal(kept.abs().amax(-1), x.view(-1, 2).abs().amax(-1))
    assert (kept == 0).sum(-1).min() == 1
    codes, _ = FiniteScalarQuantizer([4, 5])(x.view(-1, 2))
    assert codes.dtype == dtype
    assert set(codes[:, 0].tolist()) == {-1, -0.5, 0, 0.5}
    assert set(codes[:, 1].tolist()) == {-1, -0.5, 0, 0.5, 1}


@functions
def test_a_missing_value_stays_one(name):
    x = torch.full((5,), 0.3, dtype=torch.float64)
    x[2] = math.nan
    assert value_of(FUNCTIONS[name](x)).isnan().any()


@functions
def test_rows_are_independent_and_functions_map(name):
    x = torch.linspace(-2, 2, 10, dtype=torch.float64).view(2, 5)
    x[1] = x[1].flip(0) / 3
    rows = torch.stack([value_of(FUNCTIONS[name](row)) for row in x])
    assert torch.equal(value_of(FUNCTIONS[name](x)), rows)
    assert torch.equal(vmap(lambda row: value_of(FUNCTIONS[name](row)))(x), rows)
    c = torch.tensor([1.0, -2.0, 0.3, 0.7, 2.0], dtype=torch.float64)
    slopes = vmap(grad(lambda row: value_of(FUNCTIONS[name](row)) @ c))(x)
    expected = [gradient(lambda row: value_of(FUNCTIONS[name](row)) @ c, row)[1] for row in x]
    torch.testing.assert_close(slopes, torch.tensor(expected, dtype=torch.float64))


@functions
@pytest.mark.keeps_its_sums
def test_compiled_code_gives_the_same_blocked_and_open(name):
    block = {"round": ROUND, "sign": SIGN, "top_k": TOP_K, "one_hot": ONE_HOT}.get(name, FINITE_SCALAR)
    x = torch.tensor([0.3, -0.7, 0.1, 0.9, 0.45], dtype=torch.float64)
    torch.compiler.reset()  # a limit on the graphs of one line
    plain = FUNCTIONS[name]
    compiled = torch.compile(lambda x: value_of(plain(x)), backend="aot_eager", fullgraph=True)
    for opened in ((), (block,), ()):
        with unblock(*opened):
            value, slopes = gradient(lambda x: value_of(plain(x)).square().sum(), x)
            assert gradient(lambda x: compiled(x).square().sum(), x) == (pytest.approx(value), pytest.approx(slopes))


@pytest.mark.parametrize("name", ["round", "sign", "finite_scalar"])
def test_held_blocks_agree_with_finite_differences(name):
    x = torch.tensor([0.31, -0.7, 0.12, 0.9, 0.45], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: value_of(FUNCTIONS[name](x)), (x,))


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("device", [pytest.param(ACCELERATOR, marks=pytest.mark.gpu)])
def test_gradients_on_a_device(case, device):
    x = case.parameters()["x"].detach().to(device).requires_grad_()
    functions = {
        "round": lambda: round_ste(x),
        "sign": lambda: sign_ste(x),
        "top_k": lambda: top_k_ste(x, 1),
        "one_hot": lambda: one_hot_ste(x),
        "gumbel": lambda: gumbel_softmax(x, temperature=0.7, generator=torch.Generator().manual_seed(3)),
        "finite_scalar": lambda: FiniteScalarQuantizer(LEVELS).to(x.device)(x).codes,
    }
    (on_device,) = torch.autograd.grad(functions[case.id.removeprefix("quantization_")]().sum(), x)
    y = x.detach().cpu().requires_grad_()
    x = y
    (expected,) = torch.autograd.grad(functions[case.id.removeprefix("quantization_")]().sum(), y)
    torch.testing.assert_close(on_device.cpu(), expected)


# --- Gumbel-softmax --------------------------------------------------------------------------------------------------


def test_draws_have_the_probabilities_at_every_temperature():
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0], dtype=torch.float64)
    p = logits.softmax(-1)
    for temperature in (0.1, 5.0):
        generator = torch.Generator().manual_seed(1)
        draws = gumbel_softmax(logits.expand(40_000, 4), temperature=temperature, generator=generator)
        assert ((draws.mean(0) - p).abs() <= 4.5 * (p * (1 - p) / 40_000).sqrt()).all()


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 1e7), (torch.bfloat16, 20.0)])
def test_rounding_favours_no_category(dtype, temperature):
    """Relaxed entries of these temperatures are often equal in their precision; a tie would choose the first."""
    n = 100_000
    generator = torch.Generator().manual_seed(2)
    draws = gumbel_softmax(torch.zeros(n, 2, dtype=dtype), temperature=temperature, generator=generator)
    assert draws.dtype == dtype
    assert abs(draws[:, 0].double().mean() - 0.5) < 4.5 * 0.5 / n**0.5  # 4.5 standard errors


def test_a_seed_decides_the_draw():
    torch.manual_seed(5)
    one = gumbel_softmax(torch.zeros(50, 3))
    torch.manual_seed(5)
    assert torch.equal(gumbel_softmax(torch.zeros(50, 3)), one)


def test_the_noise_of_low_precision_is_finite():
    draws = gumbel_softmax(torch.zeros(100_000, 2, dtype=torch.bfloat16), generator=torch.Generator().manual_seed(0))
    assert draws.isfinite().all()
    assert abs(draws[:, 0].double().mean() - 0.5) < 0.01


# --- finite scalars --------------------------------------------------------------------------------------------------


def test_each_code_has_its_index_and_comes_back():
    quantizer = FiniteScalarQuantizer([4, 3, 2])
    codes = quantizer.codes_of(torch.arange(24).view(4, 6))
    assert codes.shape == (4, 6, 3)
    assert len({tuple(code) for code in codes.view(-1, 3).tolist()}) == quantizer.codebook_size == 24
    # A coordinate of the middle of each level, by the inverse of the bound.
    height = (torch.tensor([4.0, 3.0, 2.0]) - 1) * 1.001 / 2
    offset = torch.tensor([0.5, 0.0, 0.5])
    half = torch.tensor([2, 1, 1])
    z = ((codes * half + offset) / height).atanh() - (offset / height).atanh()
    found, indices = quantizer(z)
    torch.testing.assert_close(found, codes)
    assert torch.equal(indices.view(-1), torch.arange(24))


def test_zero_is_a_code_and_large_inputs_end_at_the_outermost_levels():
    quantizer = FiniteScalarQuantizer(LEVELS)
    codes, _ = quantizer(torch.tensor([[0.0] * 3, [1e4] * 3, [-1e4] * 3]))
    assert codes.tolist() == [[0, 0, 0], [0.75, 1, 0.5], [-1, -1, -1]]


def test_a_missing_coordinate_has_no_index_and_no_other_index_a_code():
    quantizer = FiniteScalarQuantizer(LEVELS)
    codes, indices = quantizer(torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, 0.0]]))
    assert indices.tolist() == [-1, quantizer(torch.zeros(3)).indices.item()]
    assert codes.isnan().tolist() == [[False, True, False], [False] * 3]
    assert quantizer.codes_of(torch.tensor([-1, 160, 159])).isnan().all(1).tolist() == [True, True, False]


def test_the_largest_product_of_levels_has_all_its_indices():
    quantizer = FiniteScalarQuantizer([2] * 62)
    z = torch.where(torch.arange(62) % 3 == 0, 1.0, -1.0)
    codes, indices = quantizer(z)
    assert torch.equal(quantizer.codes_of(indices), codes)


def test_saturated_inputs_have_finite_gradients():
    z = torch.tensor([[1e4] * 3, [-1e4] * 3], requires_grad=True)
    FiniteScalarQuantizer(LEVELS)(z).codes.sum().backward()
    assert z.grad.isfinite().all()


def test_the_module_keeps_its_precision_wherever_it_is_moved():
    quantizer = FiniteScalarQuantizer(LEVELS).to(torch.bfloat16)
    assert gradient(lambda z: quantizer(z).codes.sum(), Z) == gradient(
        lambda z: FiniteScalarQuantizer(LEVELS)(z).codes.sum(), Z
    )
    assert dict(quantizer.state_dict()) == {}


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k_ste(X, 4), "`k` should be an integer from 1 to 3. Found 4."),
        (lambda: round_ste("a"), "`x` should be a floating-point tensor. Found str."),
        (lambda: sign_ste([1.0]), "`x` should be a floating-point tensor. Found list."),
        (lambda: one_hot_ste("a"), "`probabilities` should be a floating-point tensor. Found str."),
        (lambda: gumbel_softmax(X.long()), "`logits` should be a floating-point tensor. Found torch.int64."),
        (lambda: gumbel_softmax(X, temperature=0), "`temperature` should be positive and finite. Found 0."),
        (lambda: FiniteScalarQuantizer([]), "`levels` should have an entry for each coordinate. Found none."),
        (lambda: FiniteScalarQuantizer([4, 1]), "`levels` should be an integer from 2. Found 1."),
        (lambda: FiniteScalarQuantizer([4], margin=0), "`margin` should be positive and finite. Found 0."),
        (
            lambda: FiniteScalarQuantizer([2] * 63),
            r"`levels` should have a product below 2\^63. Found 92",
        ),
        (lambda: FiniteScalarQuantizer([4, 4])(X), r"`z` should have shape \(..., 2\). Found \(3,\)."),
        (
            lambda: FiniteScalarQuantizer([4])(X[:1].long()),
            "`z` should be a floating-point tensor. Found torch.int64.",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("levels", [[1000], [1024, 3], [2001], [4096, 2001]])
def test_hundreds_of_levels_have_no_level_beyond_the_ends(levels):
    """The margin of 1/1000 is more than half a step there."""
    quantizer = FiniteScalarQuantizer(levels)
    codes, indices = quantizer(torch.tensor([[50.0], [-50.0]]).expand(2, len(levels)))
    counts = torch.tensor(levels)
    assert indices.tolist() == [quantizer.codebook_size - 1, 0]
    torch.testing.assert_close(codes[1], -torch.ones(len(levels)))
    torch.testing.assert_close(codes[0], (counts - 1 - counts // 2) / (counts // 2))
    assert torch.equal(quantizer.codes_of(indices), codes)
