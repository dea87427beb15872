"""Checks with blocks held: programs that are right pass at every order and mode, and programs that are wrong do not."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

from toolkit import em, is_blocked, stop_gradient, stop_recording, unblock
from toolkit.gradients import gradcheck, gradgradcheck

GENERATOR = torch.Generator().manual_seed(11)


def _randn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


FEATURES, NEXT_FEATURES, REWARDS, ADVANTAGES = _randn(4, 3), _randn(4, 3), _randn(4), _randn(4)


def _point():
    return torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64, requires_grad=True)


# --- programs ----------------------------------------------------------------------------------------------------


def temporal_differences(w):
    target = stop_gradient(REWARDS + 0.9 * (NEXT_FEATURES @ w).tanh(), "check.target")
    return ((FEATURES @ w).tanh() - target).square().mean()


def straight_through(w):
    return ((w.sin() + stop_gradient(w.sin().round() - w.sin(), "check.rounding")) * w.exp()).sum()


def policy_ratio(w):
    log_policy = nn.functional.logsigmoid(FEATURES @ w)
    ratio = (log_policy - stop_gradient(log_policy, "check.old_policy")).exp()
    return torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES).sum()


def siamese(w):
    one, other = (nn.functional.normalize((x * w).sin(), dim=1) for x in (FEATURES, NEXT_FEATURES))
    predictions = [view * w.cos() for view in (one, other)]
    targets = [stop_gradient(view, "check.branch") for view in (other, one)]
    return -sum((p * t).sum(1).mean() for p, t in zip(predictions, targets, strict=True))


def mixture(w):
    def log_joint():
        return -((FEATURES[:, :1] - w) ** 2) / 2 - w**2

    responsibilities = stop_gradient(log_joint().softmax(1), "check.responsibilities")
    return (responsibilities * log_joint()).sum(1).mean()


def written_in_place(w):
    target = stop_gradient(w.exp(), "check.in_place")
    target.mul_(0.9).add_(1)
    return (w - target).square().sum()


def tree(w):
    stopped = stop_gradient({"a": [w.exp(), None], "b": (w.sin(), torch.arange(3))}, "check.tree")
    return stopped["a"][0] * w * stopped["b"][0] * stopped["b"][1]


def several_outputs(w):
    factor = stop_gradient(w.exp(), "check.factor")
    return w * factor, (w.square() * factor).sum()


def loop(w):
    state = w
    for _ in range(4):
        state = (w * stop_gradient(state, "check.state")).tanh() + state.sin()
    return state


def second_block_inside_of_the_first(w):
    inner = stop_gradient(w.exp(), "check.inner")
    return w * stop_gradient(inner * w.sin(), "check.outer") * inner


def inner_gradient(w):
    x = w * w[0]
    (slope,) = torch.autograd.grad((x**3 * stop_gradient(x.exp(), "check.curve")).sum(), x, create_graph=True)
    return slope * stop_gradient(slope, "check.slope")


def vmapped(w):
    rows = torch.stack([w, w.sin(), w.square()])

    def f(row):
        factor = stop_gradient((row * w[2]).exp(), "check.vmapped")
        assert not factor.requires_grad
        return row @ factor

    return torch.vmap(f)(rows)


def jacobian_reverse(w):
    return torch.func.jacrev(lambda v: v.square() * stop_gradient(v.exp(), "check.jacrev") * w)(w)


def jacobian_forward(w):
    return torch.func.jacfwd(lambda v: v.square() * stop_gradient(v.exp(), "check.jacfwd") * w)(w)


def per_sample_gradients(w):
    def f(v, row):
        return (row @ v) ** 2 * stop_gradient((row @ v).sin(), "check.per_sample")

    return torch.vmap(torch.func.grad(f), (None, 0))(w, FEATURES)


def dropout(w):
    hidden = nn.functional.dropout(w.repeat(6), 0.4)
    return (hidden.square() * stop_gradient(hidden, "check.dropout")).sum() + torch.rand(()) * w.sum()


def random_everywhere(w):
    noise = float(np.random.rand()) + torch.randn((), generator=GENERATOR, dtype=w.dtype)  # noqa: NPY002
    return w.square() * noise * stop_gradient(w * noise, "check.noise")


def region(w):
    with stop_recording("check.region"):
        factor = (w * w[0]).exp()
        other = factor.sin() * w
    return factor * w + other * w.square()


def region_of_views(w):
    with stop_recording("check.views"):
        same = w.view(3)
        part = w[1:]
        turned = torch.stack([w, w]).T
        factor = torch.empty_like(same)
        factor[1:] = part
        first = factor[:1]
        first.copy_(turned[0, :1]).mul_(2)
    return w * factor + w * same + (w * turned[:, 1]).sum()


def region_that_writes(w):
    buffer = torch.zeros(3, dtype=w.dtype)
    with stop_recording("check.writes"):
        buffer[1:] = w[:2].exp()
        buffer.mul_(w)
        torch.sin(buffer, out=buffer)
        buffer += w
    return buffer * w


def region_of_numbers(w):
    with stop_recording("check.numbers"):
        scale = w[0].item() + float(w[1]) + sum(w.tolist()) + (2.0 if w[2] > 0.4 - 1e-12 else 3.0)
    return w.square() * scale


def region_in_a_loop(w):
    kept = []
    for i in range(3):
        with stop_recording("check.loop"):
            kept.append(w ** (i + 1))
    return torch.stack(kept) @ w


def nested_regions(w):
    with stop_recording("check.outer_region"):
        a = w.exp()
        with stop_recording("check.inner_region"):
            b = a * w.sin()
        c = stop_gradient(a * b, "check.in_region")
    return a * w + b * w.square() + c * w.cos()


def region_with_recording_inside(w):
    with stop_recording("check.pierced"):
        before = w.exp()
        with torch.enable_grad():
            inside = (before * w).mul_(w[0]).sin()
    return inside * before * w


def attack(w):
    with stop_recording("check.attack"):
        point = w.sin()
        with torch.enable_grad():
            variable = point.detach().requires_grad_()
            (slope,) = torch.autograd.grad((variable * w).square().sum(), variable)
        moved = point + 0.3 * slope
    return (moved * w).square()


class _Exp(torch.autograd.Function):
    """Its derivative is differentiable in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input):
        return input.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, cotangent):
        return ctx.saved_tensors[0] * cotangent

    @staticmethod
    def jvp(ctx, tangent):
        return ctx.saved_tensors[0] * tangent


def region_around_a_function(w):
    with stop_recording("check.function"):
        factor = _Exp.apply(w)
    return factor * w


def region_around_vmap(w):
    with stop_recording("check.vmap"):
        factor = torch.vmap(lambda v: v.exp() * w[0])(w)
    return factor * w.square()


def region_inside_vmap(w):
    def f(row):
        with stop_recording("check.in_vmap"):
            factor = (row * w[1]).exp()
        return row @ factor

    return torch.vmap(f)(torch.stack([w, w.sin()]))


def region_that_is_skipped(w):
    factor = w.detach().exp() if is_blocked(_SKIPPED) else w.exp()
    return w * stop_gradient(factor, _SKIPPED)


_SKIPPED = "check.skipped"
stop_gradient(torch.ones(1), _SKIPPED)


def no_block(w):
    return w.exp() * w


PROGRAMS = [
    temporal_differences,
    straight_through,
    policy_ratio,
    siamese,
    mixture,
    written_in_place,
    tree,
    several_outputs,
    loop,
    second_block_inside_of_the_first,
    inner_gradient,
    vmapped,
    jacobian_reverse,
    jacobian_forward,
    per_sample_gradients,
    dropout,
    random_everywhere,
    region,
    region_of_views,
    region_that_writes,
    region_of_numbers,
    region_in_a_loop,
    nested_regions,
    region_with_recording_inside,
    attack,
    region_around_a_function,
    region_around_vmap,
    region_inside_vmap,
    region_that_is_skipped,
    no_block,
]

# torch does not nest forward mode, nor put it over an inner reverse mode; `enable_grad` switches on reverse mode alone.
ONLY_REVERSE = [inner_gradient, jacobian_forward, region_with_recording_inside]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_right_program_passes_in_both_modes_and_at_second_order(program) -> None:
    w, both = _point(), program not in ONLY_REVERSE
    batched = both and program not in (dropout, random_everywhere)  # which `vmap` refuses
    assert gradcheck(program, w, check_forward_ad=both, check_batched_grad=True, check_batched_forward_grad=batched)
    assert gradgradcheck(program, w, check_fwd_over_rev=both, check_rev_over_rev=True)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not no_block], ids=lambda program: program.__name__)
def test_torch_alone_rejects_it(program) -> None:
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(_seeded(program), _point())


def _seeded(program):
    def run(w):
        torch.manual_seed(0)
        GENERATOR.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        return program(w)

    return run


def test_several_inputs_and_things_that_are_no_tensors() -> None:
    def program(a, power, b):
        return a**power * stop_gradient(a * b, "check.product") + b

    a, b = _point(), torch.tensor(1.5, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(program, (a, 3, b))
    assert gradgradcheck(program, [a, 3, b])
    assert gradcheck(program, (a, 3, b.detach()), fast_mode=True)


def test_expectation_maximisation_of_a_whole_mixture() -> None:
    data = torch.randn(7, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    start = em.to_unconstrained(em.start(data, 2, covariance_type="full", generator=torch.Generator().manual_seed(1)))
    names, leaves = list(start), [value.requires_grad_() for value in start.values()]

    def surrogate(*values):
        return em.surrogate(em.from_unconstrained(dict(zip(names, values, strict=True)), "full"), data)

    assert gradcheck(surrogate, leaves, check_forward_ad=True)
    assert gradgradcheck(surrogate, leaves)


def test_a_module_with_a_state() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Tanh()).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002

    def program(x):
        return model(x) * stop_gradient(model(x), "check.model")

    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert gradcheck(program, inputs.requires_grad_())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_blocks_of_a_checkpoint_are_held_where_they_are_met() -> None:
    def program(w):
        return checkpoint(lambda v: v * stop_gradient(v.exp(), "check.checkpoint"), w, use_reentrant=False)

    assert gradcheck(program, _point())


# --- programs that are wrong -------------------------------------------------------------------------------------


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.sin()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * (ctx.saved_tensors[0].cos() + 0.01)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.square()

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent * stop_gradient(ctx.saved_tensors[0], "check.in_backward")


def wrong_beside_a_block(w):
    return _Wrong.apply(w) * stop_gradient(w.exp(), "check.beside")


def bare_detach(w):
    return w * stop_gradient(w.sin(), "check.named") * w.detach()


def wrong_inside_a_pierced_region(w):
    with stop_recording("check.wrong"), torch.enable_grad():
        inside = _Wrong.apply(w)
    return inside * w


@pytest.mark.parametrize("program", [wrong_beside_a_block, bare_detach, wrong_inside_a_pierced_region])
def test_a_wrong_program_fails(program) -> None:
    w = _point()
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        gradcheck(program, w)
    assert gradcheck(program, w, raise_exception=False) is False
    assert gradcheck(program, w, atol=100.0) is True  # tolerances arrive
    with pytest.raises(GradcheckError):
        gradgradcheck(lambda w: program(w) * w, w)


@pytest.mark.parametrize("inside", [_Blocked.apply, lambda w: checkpoint(policy_ratio, w, use_reentrant=False)])
def test_a_block_inside_of_a_backward_pass_is_not_held_and_noticed(inside) -> None:
    w = _point()
    assert gradcheck(inside, w)
    with pytest.raises(GradcheckError):
        gradgradcheck(inside, w)


def test_cotangents_of_a_second_derivative_can_be_given() -> None:
    w, cotangent = _point(), torch.tensor([0.4, 1.3, -0.8], dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(loop, w, grad_outputs=cotangent)
    with pytest.raises(GradcheckError):
        gradgradcheck(lambda w: loop(w) * _Wrong.apply(w), w, grad_outputs=cotangent)


@pytest.mark.keeps_its_sums
def test_a_compiled_program_runs_the_python_that_it_was_made_of() -> None:
    compiled = torch.compile(temporal_differences, backend="eager")
    compiled(_point())
    assert gradcheck(compiled, _point())


def test_an_opened_block_is_held_and_its_opening_reported_as_useless() -> None:
    w = _point()
    temporal_differences(w)
    with pytest.raises(RuntimeError, match=r"`unblock` should not be around .* for 'check\.target'"):
        with unblock("check.target"):
            assert gradcheck(temporal_differences, w)


# --- refusals ----------------------------------------------------------------------------------------------------


def fewer_blocks(w):
    value = w.sum() * stop_gradient(w.exp(), "check.first")
    return value * stop_gradient(w.sin(), "check.second") if w[0] <= 0.7 else value


def more_blocks(w):
    return w * stop_gradient(w.exp(), "check.first") if w[0] > 0.7 else w + 1e-30


def other_names(w):
    return w * stop_gradient(w.exp(), "check.first" if w[0] <= 0.7 else "check.second")


def other_shapes(w):
    return w.sum() * stop_gradient(w[w <= 0.7].exp(), "check.first").sum()


def other_numbers(w):
    with stop_recording("check.first"):
        scale = w[0].item()
    return w * scale if w[0] <= 0.7 else w * stop_gradient(w, "check.first")


OTHER = {
    fewer_blocks: r"Found no more where it met 'check\.second' with shape \(3,\) at `inputs`",
    more_blocks: r"Found 'check\.first' with shape \(3,\) where it met no more at `inputs`",
    other_names: r"Found 'check\.second' with shape \(3,\) where it met 'check\.first' with shape \(3,\)",
    other_shapes: r"Found 'check\.first' with shape \(2,\) where it met 'check\.first' with shape \(3,\)",
    other_numbers: r"Found 'check\.first' with shape \(3,\) where it met no more",
}


@pytest.mark.parametrize("program", OTHER, ids=lambda program: program.__name__)
def test_other_blocks_at_a_perturbed_point_are_refused(program) -> None:
    for check in (gradcheck, gradgradcheck):
        with pytest.raises(RuntimeError, match="`fn` should meet the same blocks at every point. " + OTHER[program]):
            check(program, _point(), raise_exception=False)


def test_a_program_that_is_random_in_its_own_way_is_refused() -> None:
    count = (number for number in itertools.count())
    with pytest.raises(RuntimeError, match="`fn` should give the same values and derivatives"):
        gradcheck(lambda w: w * stop_gradient(w, "check.count") + next(count), _point())


def test_a_program_that_only_asks_whether_a_block_is_in_place_is_refused() -> None:
    def program(w):
        return w * (w.exp().detach() if is_blocked(_SKIPPED) else w.exp())

    with pytest.raises(RuntimeError, match="`fn` should give the same values and derivatives"):
        gradcheck(program, _point())


def test_a_value_that_is_not_a_number_is_the_same_value() -> None:
    factor = torch.tensor([1.0, math.nan, 1.0], dtype=torch.float64)
    gradcheck(lambda w: w * stop_gradient(w, "check.nan") * factor, _point(), raise_exception=False)


def test_a_write_into_what_a_block_shares_is_refused() -> None:
    def program(w):
        source = w.sin()
        stop_gradient(source, "check.shared").mul_(2)
        return source + w

    with pytest.raises(RuntimeError, match="writes into memory that a block shares"):
        gradcheck(program, _point())


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd], ids=["grad", "jacfwd"])
def test_a_functional_derivative_inside_of_a_region_is_refused(transform) -> None:
    def program(w):
        with stop_recording("check.functional"):
            slope = transform(lambda v: (v * w).square().sum())(w)
        return slope * w

    with pytest.raises(RuntimeError, match=r"no derivative of torch\.func inside of region 'check\.functional'"):
        gradcheck(program, _point())

    def instead(w):
        return stop_gradient(transform(lambda v: (v * w).square().sum())(w), "check.instead") * w

    assert gradcheck(instead, _point())


def test_inputs_without_a_gradient_are_refused() -> None:
    for inputs in (torch.ones(2).double(), [], (1.0, torch.ones(2).double())):
        with pytest.raises(ValueError, match="`inputs` should have a tensor that requires a gradient"):
            gradcheck(no_block, inputs)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_wrong_arguments_are_named(check) -> None:
    x = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)
    for fn, inputs, message in [
        (x, x, "`fn` should be a function that returns tensors. Found Tensor."),
        (lambda x, y: x, x, "`fn` should take `inputs`. Found a function: missing a required argument: 'y'."),
        (lambda x: {"y": x}, x, "`fn` should return a tensor or a tuple of tensors. Found dict."),
        (lambda x: (x, None), x, "`fn` should return a tensor or a tuple of tensors. Found NoneType."),
        (no_block, {"x": x}, "`inputs` should be a tensor or a sequence of arguments. Found dict."),
        (no_block, 3, "`inputs` should be a tensor or a sequence of arguments. Found int."),
    ]:
        with pytest.raises(TypeError, match=re.escape(message)):
            check(fn, inputs)
    with torch.no_grad():
        assert check(lambda x: x**3 * stop_gradient(x, "check.factor"), x)


def test_a_constant_has_no_second_derivative_to_check() -> None:
    x = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: stop_gradient(x, "check.all"), x)
    with pytest.raises(ValueError, match="`fn` should depend on `inputs` beside its blocks"):
        gradgradcheck(lambda x: stop_gradient(x, "check.all"), x)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_inputs_that_are_not_dense_are_refused(check):
    sparse = torch.eye(2, dtype=torch.float64).to_sparse().requires_grad_()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True)
    for given, kind in ((sparse, "sparse_coo"), (nested, "nested")):
        with pytest.raises(ValueError, match=f"`inputs` should be dense tensors. Found a {kind} one"):
            check(lambda x: x.sum(), given)
