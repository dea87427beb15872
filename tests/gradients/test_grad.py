"""Stops after the fact against the same stops built into the graph, which is the definition."""

import itertools

import pytest
import torch
from torch import Tensor

from toolkit import stop_gradient
from toolkit.gradients import grad

VARIABLES = "abcd"
SUBSETS = ["".join(subset) for size in range(5) for subset in itertools.combinations(VARIABLES, size)]


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


# --- TensorFlow's own tests --------------------------------------------------------------------------------------


def _tensorflow_graph(stopped: str) -> dict[str, Tensor]:
    """Build the graph of TensorFlow's `GradientsTest.testStopGradients`, some of its tensors made constant.

    A constant is a new leaf, so that the derivative by it, and not past it, can be asked for.
    """
    generator = torch.Generator().manual_seed(5)
    graph: dict[str, Tensor] = {}

    def matrix() -> Tensor:
        return torch.rand(3, 3, generator=generator, dtype=torch.float64)

    for name, parents in {"a": "", "b": "a", "c": "ab", "d": "bc"}.items():
        value = matrix().requires_grad_()
        for parent in parents:
            value = value + matrix() @ graph[parent]
        graph[name] = value.detach().requires_grad_() if name in stopped else value
    return graph


@pytest.mark.parametrize("constants", SUBSETS, ids=lambda subset: subset or "none")
def test_every_subset_is_what_building_the_graph_with_the_stops_gives(constants: str) -> None:
    built, graph = _tensorflow_graph(constants), _tensorflow_graph("")
    reached = 0
    for variables in filter(None, SUBSETS):
        expected = torch.autograd.grad(
            built["d"].sum(), [built[v] for v in variables], retain_graph=True, allow_unused=True
        )
        stops = [graph[v] for v in constants]
        found = grad(graph["d"], [graph[v] for v in variables], stop_gradients=stops, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.equal(one, other)
                reached += 1
    assert reached >= 8  # d, alone and with every subset of the others


def test_partial_derivatives() -> None:
    x = torch.tensor(1.0, requires_grad=True)
    y = 2 * x
    z = x + y
    assert grad(z, [x, y], retain_graph=True) == (3, 1)
    assert grad(z, [x, y], stop_gradients=[x, y], retain_graph=True) == (1, 1)
    assert grad(z, [x, y]) == (3, 1)


def test_a_graph_that_is_stopped_already_has_no_derivative() -> None:
    x = torch.ones(3, requires_grad=True)
    assert grad(stop_gradient(x, "test_grad.x"), x) == (None,)
    (found,) = grad([stop_gradient(x, "test_grad.x"), 2 * x], x)
    assert found is not None
    assert torch.equal(found, torch.full((3,), 2.0))


def test_values_are_summed_as_tensorflow_sums_them() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    ys = [x.square(), 3 * x]
    (ones,) = grad(ys, x, retain_graph=True)
    assert torch.equal(ones, 2 * x.detach() + 3)
    (weighted,) = grad(ys, x, grad_ys=[torch.tensor([1.0, -1.0]), None])
    assert torch.equal(weighted, torch.tensor([2.0 + 3, -4 + 3]))


# --- which edges are cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [lambda x: x.unbind(), lambda x: [p[0] for p in x.split(1)]], ids=["unbind", "split"])
def test_one_output_of_many_is_stopped_alone(parts) -> None:
    x = torch.tensor([2.0, 3.0, 5.0], requires_grad=True)
    a, b, c = parts(x)
    y = a * b * c
    (found,) = grad(y, x, stop_gradients=b, retain_graph=True)
    assert torch.equal(found, torch.tensor([15.0, 0.0, 6.0]))
    assert grad(y, x, stop_gradients=[a, b, c]) == (None,)


def test_a_leaf_and_a_constant_among_the_stops_change_nothing() -> None:
    x, constant = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0)
    assert grad(x * x * constant, x, stop_gradients=[x, constant]) == (12,)


def test_a_root_that_is_stopped_passes_nothing_on() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = x.square()
    assert grad(y, [x, y], stop_gradients=y, retain_graph=True) == (None, 1)
    assert grad([y, 2 * y], [x, y], stop_gradients=y) == (None, 3)


def test_the_first_stop_that_is_met_wins() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = x.square()
    z = y.square()
    assert grad(z + y, [x, y], stop_gradients=z, retain_graph=True) == (6, 1)
    assert grad(z + y, [x, y], stop_gradients=[z, y]) == (None, 1)


def test_a_value_written_in_place_is_stopped_as_it_is_now() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = 2 * x
    before = 5 * y
    y.mul_(3)
    (found,) = grad(before + y, x, stop_gradients=y)
    assert torch.equal(found, torch.full((2,), 10.0))


# --- nothing, rather than zero times infinity --------------------------------------------------------------------


class _Root(torch.autograd.Function):
    """A square root whose derivative is computed, as a custom function's is, also of zeros in the place of nothing."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.sqrt()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent / (2 * ctx.saved_tensors[0].sqrt())


@pytest.mark.parametrize("root", [torch.sqrt, _Root.apply], ids=["torch", "custom"])
@pytest.mark.parametrize("chain", [0, 1, 2])
def test_an_infinite_slope_behind_a_stop_gives_no_nan(root, chain: int) -> None:
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    stopped = root(x)
    for _ in range(chain):
        stopped = root(2 * stopped)
    (found,) = grad(stopped + x, x, stop_gradients=stopped, retain_graph=True)
    assert torch.equal(found, _ones(2))
    assert grad(stopped, x, stop_gradients=stopped) == (None,)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b, a - b

    @staticmethod
    def backward(ctx, first, second):
        return first + second, first - second


def test_a_custom_function_with_an_output_left_still_gets_zeros_for_the_other() -> None:
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    total, difference = _Sum.apply(a, b)
    assert grad(2 * total + 5 * difference, [a, b], stop_gradients=total) == (5, -5)


# --- graphs, second derivatives, hooks ---------------------------------------------------------------------------


def test_a_second_derivative_has_stops_of_its_own() -> None:
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    square = x.square()
    y = x * square
    (first,) = grad(y, x, stop_gradients=square, create_graph=True)
    assert first == 9  # x^2, as if the factor were constant
    assert grad(first, x, retain_graph=True) == (6,)  # which moves with x
    assert grad(first, x, stop_gradients=square) == (None,)


def test_the_graph_is_freed_unless_it_is_retained() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = x.square()
    z = y.square()
    grad(z, x, stop_gradients=z, retain_graph=True)
    grad(z, x)
    with pytest.raises(RuntimeError, match="second time"):
        grad(z, x)


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = _Root.apply(x.square())
    z = y * x

    def refuse(cotangent: Tensor) -> None:
        raise ArithmeticError

    handle = z.register_hook(refuse)
    with pytest.raises(ArithmeticError):
        grad(z, x, stop_gradients=y, retain_graph=True)
    handle.remove()
    assert torch.autograd.grad(z, x, retain_graph=True) == (6,)
    grad(z, x, stop_gradients=y, retain_graph=True)
    assert torch.autograd.grad(z, x) == (6,)


def test_gradients_of_the_program_are_not_touched() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    x.grad = torch.tensor(7.0)
    grad(x.square(), x)
    assert x.grad == 7


def test_complex_tensors_follow_the_convention_of_torch() -> None:
    z = torch.tensor(1 + 2j, dtype=torch.complex128, requires_grad=True)
    w = z * z
    weight = torch.tensor(0.5 - 1j, dtype=torch.complex128)
    (found,) = grad(w * z, z, grad_ys=weight, stop_gradients=w)
    assert found == weight * (z.detach() ** 2).conj()


# --- wrong arguments ---------------------------------------------------------------------------------------------

X = torch.ones(2, requires_grad=True)
Z = torch.ones(2, dtype=torch.complex64, requires_grad=True)

WRONG = {
    "ys of text": (TypeError, "`ys` should be a tensor or a sequence", lambda: grad("y", X)),
    "xs of numbers": (TypeError, "`xs` should hold tensors. Found float at 0", lambda: grad(X.sum(), [1.0])),
    "stops of numbers": (TypeError, "`stop_gradients` should hold tensors", lambda: grad(X, X, stop_gradients=[X, 2])),
    "a stop of None": (TypeError, "`stop_gradients` should be a tensor or", lambda: grad(X, X, stop_gradients=None)),
    "no ys": (ValueError, "`ys` should have at least one tensor", lambda: grad([], X)),
    "no xs": (ValueError, "`xs` should have at least one tensor", lambda: grad(X, [])),
    "constant xs": (
        ValueError,
        r"`xs` should require a gradient. Found a constant of shape \(3,\) at 1",
        lambda: grad(X, [X, torch.ones(3)]),
    ),
    "too many weights": (ValueError, "one entry for each of 1 tensors", lambda: grad(X, X, grad_ys=[X, X])),
    "weights of numbers": (TypeError, "`grad_ys` should hold tensors or None", lambda: grad(X, X, grad_ys=[1.0])),
    "weights of another shape": (ValueError, "`grad_ys` should have the shapes", lambda: grad(X, X, grad_ys=X[0])),
    "complex ys": (TypeError, "`grad_ys` should have weights for complex", lambda: grad(Z * Z, Z)),
}


@pytest.mark.parametrize(("error", "message", "call"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(error, message: str, call) -> None:
    with pytest.raises(error, match=message):
        call()
