"""Vector quantization: every block by itself, exact codes, and codebooks that learn in training mode alone."""

import copy
import math

import pytest
import sklearn.cluster
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from values import leaves, seeded

from toolkit import compare, unblock
from toolkit.gradients import field_jacobian
from toolkit.quantization import (
    AVERAGES,
    CODEBOOK_TARGETS,
    COMMITMENT_TARGETS,
    RESIDUAL,
    RESTARTS,
    ROTATION,
    STRAIGHT_THROUGH,
    ResidualVectorQuantizer,
    VectorQuantizer,
    averaged_codebook,
    codebook_loss,
    codebook_perplexity,
    commitment_loss,
    kmeans_codebook,
    nearest_codes,
    restarted_codebook,
    rotation_trick,
    straight_through,
)

BETA = 0.25


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- cases of the blocks ---------------------------------------------------------------------------------------------

Z, CODEBOOK, GOAL = tensor([0.4, 1.1]), tensor([[0.0, 1.0], [1.0, 0.5], [-1.0, 2.0]]), tensor([1.0, -1.0])


def autoencoder_loss(parameters) -> Tensor:
    """The loss of the paper with sums over the two entries, of one vector whose code is the first."""
    quantizer = VectorQuantizer(2, 3, commitment=BETA, learning="loss").double()
    codes, _, loss = functional_call(quantizer, {"codebook": parameters["codebook"]}, (parameters["z"],))
    return (codes - GOAL).square().sum() + 2 * loss


def autoencoder_gradient(*, decoder_to: str = "z", z: float = 2 * BETA, code: float = -2.0):
    """Return the witness: the decoder's gradient to one side, and the difference d = z - e with a factor to both."""

    def witness(parameters):
        d, decoder = Z - CODEBOOK[0], 2 * (CODEBOOK[0] - GOAL)
        to_z, to_code = (z * d + decoder * (decoder_to == "z"), code * d + decoder * (decoder_to == "code"))
        return {"z": to_z, "codebook": torch.stack([to_code, torch.zeros(2).double(), torch.zeros(2).double()])}

    return witness


def autoencoder_case(block, opened) -> BlockCase:
    return BlockCase(
        id=f"{block.name.replace('.', '_')}_of_a_module",
        block=block,
        parameters=leaves(z=Z, codebook=CODEBOOK),
        loss=autoencoder_loss,
        blocked=autoencoder_gradient(),
        opened=opened,
    )


FROM, TO, COTANGENT = tensor([0.4, 1.1, -0.3]), tensor([0.0, 1.0, 0.5]), tensor([1.0, -2.0, 0.3])


def rotation(z: Tensor, e: Tensor) -> Tensor:
    """Return the matrix ``lambda R`` by the definition."""
    unit_z, unit_e = z / z.norm(), e / e.norm()
    r = (unit_z + unit_e) / (unit_z + unit_e).norm()
    turn = torch.eye(len(z)).double() - 2 * torch.outer(r, r) + 2 * torch.outer(unit_e, unit_z)
    return e.norm() / z.norm() * turn


BATCH = tensor([[0.1, 0.8], [0.5, 1.3], [0.9, 0.2]])
COUNTS, DECAY, WEIGHTS = tensor([2.0, 3.0, 1.0]), 0.9, tensor([[1.0, -2.0], [0.5, 0.3], [0.7, 1.1]])


def averages(parameters) -> Tensor:
    z = parameters["z"]
    codebook, _ = averaged_codebook(CODEBOOK, COUNTS, z, nearest_codes(z, CODEBOOK), decay=DECAY)
    return (codebook * WEIGHTS).sum() + 0.5 * z.square().sum()


def leak_of_averages(z: Tensor) -> Tensor:
    """Return ``c_k (1 - decay) / N'_k`` of each vector; codes 0, 0 and 1 are chosen."""
    counts = DECAY * COUNTS + (1 - DECAY) * tensor([2.0, 1.0, 0.0])
    return ((1 - DECAY) * WEIGHTS / counts[:, None])[[0, 0, 1]]


def two_batches(parameters) -> Tensor:
    """Train a module on one batch and use its averaged codebook on the next."""
    quantizer = VectorQuantizer(2, 3, decay=DECAY, commitment=0.0).double()
    quantizer.codebook.copy_(CODEBOOK)
    quantizer.counts.copy_(COUNTS)
    quantizer(parameters["z"])
    return (quantizer.codes_of(torch.arange(3)) * WEIGHTS).sum() + 0.5 * parameters["z"].square().sum()


def restarts(parameters) -> Tensor:
    codes, _ = restarted_codebook(
        parameters["codebook"], tensor([0.1, 5.0, 0.2]), parameters["z"], below=1.0, generator=seeded()
    )
    return (codes * WEIGHTS).sum() + 0.5 * parameters["z"].square().sum()


def restarts_gradient(opened: bool):
    def witness(parameters):
        z = parameters["z"].detach().clone()
        for code, row in enumerate(torch.randint(3, (3,), generator=seeded()).tolist()):
            if opened and code in (0, 2):
                z[row] += WEIGHTS[code]
        return {"z": z, "codebook": WEIGHTS * tensor([[0.0], [1.0], [0.0]])}

    return witness


STAGES = tensor([[[0.0, 1.0], [1.0, 0.5]], [[0.3, 0.2], [-0.2, -0.1]]])
SLOPE = tensor([1.0, -2.0])


def residual_loss(parameters) -> Tensor:
    quantizer = ResidualVectorQuantizer(2, 2, 2, commitment=BETA, learning="loss").double()
    codebooks = {f"stages.{stage}.codebook": parameters[f"codebook_{stage}"] for stage in range(2)}
    codes, _, loss = functional_call(quantizer, codebooks, (parameters["z"],))
    return codes @ SLOPE + 2 * loss


def residual_gradient(leak: float):
    """Return the witness; the first code of both stages is the nearest."""

    def witness(parameters):
        first, second = Z - STAGES[0, 0], Z - STAGES[0, 0] - STAGES[1, 0]
        zero = torch.zeros(2).double()
        return {
            "z": SLOPE + 2 * BETA * (first + second),
            "codebook_0": torch.stack([-2 * first - leak * 2 * BETA * second, zero]),
            "codebook_1": torch.stack([-2 * second, zero]),
        }

    return witness


BLOCK_CASES = [
    autoencoder_case(STRAIGHT_THROUGH, autoencoder_gradient(decoder_to="code")),
    autoencoder_case(CODEBOOK_TARGETS, autoencoder_gradient(z=2 * BETA + 2)),
    autoencoder_case(COMMITMENT_TARGETS, autoencoder_gradient(code=-2 - 2 * BETA)),
    BlockCase(
        id="quantization_straight_through",
        block=STRAIGHT_THROUGH,
        parameters=leaves(z=FROM, e=TO),
        loss=lambda p: straight_through(p["z"], p["e"]) @ COTANGENT,
        blocked=lambda p: {"z": COTANGENT, "e": 0 * TO},
        opened=lambda p: {"z": 0 * FROM, "e": COTANGENT},
    ),
    BlockCase(
        id="quantization_rotation",
        block=ROTATION,
        parameters=leaves(z=FROM, e=TO),
        loss=lambda p: rotation_trick(p["z"], p["e"]) @ COTANGENT,
        blocked=lambda p: {"z": rotation(FROM, TO).T @ COTANGENT, "e": 0 * TO},
        opened=lambda p: {"z": 0 * FROM, "e": COTANGENT},
    ),
    BlockCase(
        id="quantization_averages",
        block=AVERAGES,
        parameters=leaves(z=BATCH),
        loss=averages,
        blocked=lambda p: {"z": p["z"].detach()},
        opened=lambda p: {"z": p["z"].detach() + leak_of_averages(p["z"])},
    ),
    BlockCase(
        id="quantization_averages_of_a_module",
        block=AVERAGES,
        parameters=leaves(z=BATCH),
        loss=two_batches,
        blocked=lambda p: {"z": p["z"].detach()},
        opened=lambda p: {"z": p["z"].detach() + leak_of_averages(p["z"])},
    ),
    BlockCase(
        id="quantization_restarts",
        block=RESTARTS,
        parameters=leaves(z=BATCH, codebook=CODEBOOK),
        loss=restarts,
        blocked=restarts_gradient(False),
        opened=restarts_gradient(True),
    ),
    BlockCase(
        id="quantization_residual",
        block=RESIDUAL,
        parameters=leaves(z=Z, codebook_0=STAGES[0], codebook_1=STAGES[1]),
        loss=residual_loss,
        blocked=residual_gradient(0),
        opened=residual_gradient(1),
    ),
]


def autoencoder_of_functions(p, c) -> Tensor:
    e = p["codebook"][nearest_codes(p["z"], p["codebook"])]
    y = straight_through(p["z"], e)
    return (y - GOAL).square().sum() + 2 * (codebook_loss(p["z"], e) + BETA * commitment_loss(p["z"], e))


PEER_CASES = {
    "vector_quantizer": ({"z": Z, "codebook": CODEBOOK}, {"goal": GOAL}, autoencoder_of_functions),
    "rotated_codes": (
        {"z": FROM, "e": TO},
        {"c": COTANGENT},
        lambda p, c: rotation_trick(p["z"], p["e"]) @ c["c"],
    ),
    "averaged_codes": (
        {"z": BATCH, "first": CODEBOOK},
        {
            "codebook": CODEBOOK,
            "counts": COUNTS,
            "weights": WEIGHTS,
            "chosen": torch.nn.functional.one_hot(torch.tensor([0, 0, 1]), 3).double(),
            "drawn": torch.nn.functional.one_hot(torch.randint(3, (3,), generator=seeded()), 3).double(),
            "dead": tensor([[1.0], [0.0], [1.0]]),
        },
        lambda p, c: averages(p) + restarts({"z": p["z"], "codebook": p["first"]}),
    ),
    "residual_codes": (
        {"z": Z, "codebook_0": STAGES[0], "codebook_1": STAGES[1]},
        {"c": SLOPE},
        lambda p, c: residual_loss(p),
    ),
}


# --- numbers on paper ------------------------------------------------------------------------------------------------


def gradients(loss, parameters) -> dict[str, list[float]]:
    found = torch.autograd.grad(loss(parameters), list(parameters.values()), allow_unused=True, materialize_grads=True)
    return {name: slope.flatten().tolist() for name, slope in zip(parameters, found, strict=True)}


def test_the_numbers_of_the_three_losses():
    parameters = leaves(z=Z, codebook=CODEBOOK)
    assert autoencoder_loss(parameters()).item() == pytest.approx(5.2125)
    closed = gradients(autoencoder_loss, parameters())
    assert closed["z"] == pytest.approx([-1.8, 4.05])
    assert closed["codebook"] == pytest.approx([-0.8, -0.2, 0, 0, 0, 0])
    with unblock(STRAIGHT_THROUGH, CODEBOOK_TARGETS, COMMITMENT_TARGETS):
        opened = gradients(autoencoder_loss, parameters())
    assert opened["z"] == pytest.approx([1.0, 0.25])
    assert opened["codebook"] == pytest.approx([-3, 3.75, 0, 0, 0, 0])


def test_the_numbers_of_the_rotation():
    case = next(case for case in BLOCK_CASES if case.id == "quantization_rotation")
    assert case.loss(case.parameters()).item() == pytest.approx(-1.85)
    found = gradients(case.loss, case.parameters())
    assert found["z"] == pytest.approx([0.4904799133, -1.482248295, 1.385729468], rel=1e-9)
    assert found["e"] == [0, 0, 0]


def test_the_numbers_of_the_averages():
    codes, counts = averaged_codebook(CODEBOOK, COUNTS, BATCH, nearest_codes(BATCH, CODEBOOK), decay=DECAY)
    assert codes.flatten().tolist() == pytest.approx([0.03, 1.005, 0.9964285714, 0.4892857143, -1, 2], rel=1e-9)
    assert counts.tolist() == pytest.approx([2.0, 2.8, 0.9])


def test_the_field_of_the_three_losses_is_no_gradient():
    """By z and the code e it is ``(f'(e) + 2 beta d, -2 d)``, of Jacobian ``[[2 beta, f'' - 2 beta], [-2, 2]]``."""
    z, e = tensor([0.4]).requires_grad_(), tensor([0.0]).requires_grad_()

    def loss() -> Tensor:
        y = straight_through(z, e)
        return (y - 1).square().sum() + codebook_loss(z, e) + BETA * commitment_loss(z, e)

    jacobian = tensor([[2 * BETA, 2 - 2 * BETA], [-2.0, 2.0]])
    field = field_jacobian(loss, {"z": z, "e": e})
    torch.testing.assert_close(field.jacobian, jacobian)
    assert field.asymmetry == pytest.approx((jacobian - jacobian.T).norm().item() / jacobian.norm().item())
    assert field.asymmetry == pytest.approx(1.5275, abs=1e-4)
    assert not field.is_gradient_field


# --- one straight-through step around the sum ------------------------------------------------------------------------


def stages_with_a_step_each(z: Tensor, codebooks: Tensor, *, hold) -> tuple[Tensor, Tensor]:
    """Residual quantization as in other programs: a straight-through step in each stage. `hold` is the block."""
    remainder, total, loss = z, torch.zeros_like(z), z.new_zeros(())
    for codebook in codebooks:
        e = codebook[nearest_codes(remainder, codebook)]
        loss = loss + (remainder - e).square().sum()
        step = remainder + (e - remainder).detach()
        remainder, total = remainder - hold(step), total + step
    return total, loss


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_one_step_around_the_sum_is_right_and_a_step_in_each_stage_is_not(n):
    codebooks = torch.randn(n, 6, 3, generator=seeded(1), dtype=torch.float64)
    z = torch.randn(5, 3, generator=seeded(2), dtype=torch.float64, requires_grad=True)
    quantizer = ResidualVectorQuantizer(3, 6, n, commitment=1.0).double().eval()
    for stage, codebook in zip(quantizer.stages, codebooks, strict=True):
        stage.codebook.copy_(codebook)

    codes, indices, loss = quantizer(z)
    (slope,) = torch.autograd.grad(codes.sum(), z, retain_graph=True)
    assert torch.equal(slope, torch.ones_like(z))
    (commitment,) = torch.autograd.grad(loss * z.numel(), z)

    blocked, their_loss = stages_with_a_step_each(z, codebooks, hold=Tensor.detach)
    (theirs,) = torch.autograd.grad(blocked.sum(), z, retain_graph=True)
    torch.testing.assert_close(blocked, codes)
    torch.testing.assert_close(theirs, n * torch.ones_like(z))
    (their_commitment,) = torch.autograd.grad(their_loss, z)
    torch.testing.assert_close(commitment, their_commitment)

    opened, their_loss = stages_with_a_step_each(z, codebooks, hold=lambda step: step)
    (theirs,) = torch.autograd.grad(opened.sum(), z, retain_graph=True)
    torch.testing.assert_close(theirs, torch.ones_like(z))
    (their_commitment,) = torch.autograd.grad(their_loss, z)
    first = 2 * (z - codebooks[0][indices[:, 0]])
    torch.testing.assert_close(their_commitment, first.detach())
    assert n == 1 or not torch.allclose(commitment, first)


def test_stages_can_be_decoded_one_after_the_other():
    quantizer = ResidualVectorQuantizer(3, 6, 4, generator=seeded())
    z = torch.randn(50, 3, generator=seeded(2))
    quantizer.start(z, generator=seeded(3))
    quantizer.eval()
    codes, indices, _ = quantizer(z)
    torch.testing.assert_close(quantizer.codes_of(indices), codes)
    errors = [(quantizer.codes_of(indices[:, :m]) - z).square().mean().item() for m in range(1, 5)]
    assert errors == sorted(errors, reverse=True)


# --- the nearest code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (3, 5, 4), (0, 4), (1600, 4)])
def test_the_nearest_code_is_the_nearest(shape):
    codebook = torch.randn(700, 4, generator=seeded(1), dtype=torch.float64)
    z = torch.randn(shape, generator=seeded(2), dtype=torch.float64)
    distances = (z[..., None, :] - codebook).square().sum(-1)
    assert torch.equal(nearest_codes(z, codebook), distances.argmin(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_of_half_precision_are_compared_in_float32(dtype):
    z, codebook = (torch.randn(n, 16, generator=seeded(n)).to(dtype) for n in (500, 64))
    assert torch.equal(nearest_codes(z, codebook), nearest_codes(z.double(), codebook.double()))
    large = torch.tensor([[1.0], [100.0]]).expand(2, 64).to(dtype)  # squares beyond the range of float16
    assert nearest_codes(large, large).tolist() == [0, 1]


def test_the_first_of_several_nearest_codes_is_chosen():
    assert nearest_codes(tensor([[0.0], [5.0]]), tensor([[1.0], [-1.0], [1.0], [-1.0]])).tolist() == [0, 0]


def test_a_common_offset_costs_no_precision():
    """A product with the codes themselves loses all digits of the difference here."""
    codebook = torch.randn(64, 8, generator=seeded(1))
    z = codebook[torch.arange(500) % 64] + 0.2 * torch.randn(500, 8, generator=seeded(2))
    near = nearest_codes(z.double(), codebook.double())
    moved, codes = z + 1e4, codebook + 1e4
    assert (nearest_codes(moved, codes) == near).double().mean() > 0.99
    naive = (moved @ codes.T - codes.square().sum(1) / 2).argmax(1)
    assert (naive == near).double().mean() < 0.5


def test_inputs_of_half_precision_and_autocast_use_the_precision_of_the_codebook():
    codebook = torch.randn(256, 16, generator=seeded(1))
    z = torch.randn(200, 16, generator=seeded(2)).bfloat16()
    expected = nearest_codes(z.float(), codebook)
    assert torch.equal(nearest_codes(z, codebook), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nearest_codes(z.float(), codebook), expected)


# --- values and edges of the estimators ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [straight_through, rotation_trick], ids=["straight_through", "rotation"])
@pytest.mark.parametrize("scale", [1.0, 1e6, 0.0])
def test_the_value_is_exactly_the_code(estimator, scale):
    z, e = scale * torch.randn(100, 7, generator=seeded(1)), torch.randn(100, 7, generator=seeded(2))
    assert torch.equal(estimator(z, e), e)
    if scale == 1e6:
        assert not torch.equal(z + (e - z), e)


@pytest.mark.parametrize(
    ("z", "e"),
    [
        ([0.0, 0.0, 0.0], [0.0, 1.0, 0.5]),
        ([1e-30, 0.0, 0.0], [0.0, 1.0, 0.5]),
        ([0.4, 1.1, -0.3], [-0.8, -2.2, 0.6]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
    ids=["zero", "tiny", "opposite", "both zero"],
)
def test_an_undetermined_rotation_is_a_straight_through_step(z, e):
    z = torch.tensor(z, requires_grad=True)
    y = rotation_trick(z, torch.tensor(e))
    assert y.tolist() == torch.tensor(e).tolist()
    assert torch.autograd.grad(y @ COTANGENT.float(), z)[0].tolist() == COTANGENT.float().tolist()


def test_a_code_of_zero_ends_the_rotated_gradient():
    z = FROM.clone().requires_grad_()
    assert torch.autograd.grad(rotation_trick(z, 0 * TO) @ COTANGENT, z)[0].tolist() == [0, 0, 0]


def test_the_rotated_gradient_keeps_its_angle_to_the_code():
    z = torch.randn(50, 6, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    e = torch.randn(50, 6, generator=seeded(2), dtype=torch.float64)
    c = torch.randn(50, 6, generator=seeded(3), dtype=torch.float64)
    (found,) = torch.autograd.grad((rotation_trick(z, e) * c).sum(), z)
    expected = torch.stack([rotation(a, b).T @ d for a, b, d in zip(z.detach(), e, c, strict=True)])
    torch.testing.assert_close(found, expected)
    cosine = torch.nn.functional.cosine_similarity
    torch.testing.assert_close(cosine(found, z), cosine(c, e))


@pytest.mark.parametrize("sizes", [(1e30, 1e30), (1e-30, 1e-30), (1e30, 1.0), (1e25, 1e30)], ids=str)
def test_a_rotation_of_vectors_whose_squares_are_no_float32(sizes):
    z, e, c = torch.tensor([2.0, 0.5]), torch.tensor([0.3, 1.0]), torch.tensor([4.0, 6.0])
    far = (z * sizes[0]).requires_grad_()
    (found,) = torch.autograd.grad((rotation_trick(far, e * sizes[1]) * c).sum(), far)
    expected = rotation(z.double(), e.double()).T @ c.double()
    torch.testing.assert_close(found.double() * (sizes[0] / sizes[1]), expected, rtol=1e-5, atol=0)


def test_missing_values_stay_missing():
    quantizer = VectorQuantizer(2, 3, generator=seeded())
    assert quantizer.eval()(torch.tensor([[math.nan, 0.0]])).codes.isnan().any()


def test_tangents_pass_as_cotangents_do():
    z, v = (torch.randn(5, 2, generator=seeded(seed), dtype=torch.float64) for seed in (1, 2))
    quantizer = VectorQuantizer(2, 6, generator=seeded()).double().eval()
    codes, tangent = jvp(lambda z: quantizer(z).codes, (z,), (v,))
    assert torch.equal(codes, quantizer(z).codes)
    assert torch.equal(tangent, v)
    _, tangent = jvp(lambda z: rotation_trick(z, codes), (z,), (v,))
    expected = torch.stack([rotation(a, b) @ d for a, b, d in zip(z, codes, v, strict=True)])
    torch.testing.assert_close(tangent, expected)


def test_functions_map():
    z = torch.randn(4, 3, 2, generator=seeded(1), dtype=torch.float64)

    def loss(z):
        e = CODEBOOK[nearest_codes(z, CODEBOOK)]
        return (straight_through(z, e) + rotation_trick(z, e)).square().sum() + commitment_loss(z, e)

    each = [torch.autograd.functional.jacobian(loss, rows) for rows in z]
    torch.testing.assert_close(vmap(grad(loss))(z), torch.stack(each))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["straight_through", "rotation"])
@pytest.mark.keeps_its_sums
def test_compiled_code_gives_the_same_blocked_and_open(estimator):
    torch.compiler.reset()
    block = STRAIGHT_THROUGH if estimator == "straight_through" else ROTATION
    x = torch.randn(20, 4, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    plain = VectorQuantizer(4, 8, estimator=estimator, generator=seeded()).double()
    compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    for opened in ((), (block,), ()):
        slopes = []
        for module in (plain, compiled):
            with unblock(*opened):
                codes, _, loss = module(x)
                slopes.append(torch.autograd.grad(codes.square().sum() + x.sum() + loss, x)[0])
        torch.testing.assert_close(slopes[1], slopes[0])
        torch.testing.assert_close(compiled.codebook, plain.codebook)


# --- codebooks learn -------------------------------------------------------------------------------------------------


def test_averages_without_memory_are_lloyds_steps():
    """By scikit-learn, from the same start."""
    z = torch.randn(200, 3, generator=seeded(1), dtype=torch.float64)
    start = z[torch.randperm(200, generator=seeded(2))[:5]]
    expected = sklearn.cluster.KMeans(5, init=start.numpy(), n_init=1, max_iter=100, algorithm="lloyd", tol=0).fit(z)
    found = kmeans_codebook(z, 5, steps=100, generator=seeded(2))
    torch.testing.assert_close(found, torch.from_numpy(expected.cluster_centers_))


def test_averages_are_ratios_of_averaged_sums_and_counts():
    z = torch.randn(4, 30, 2, generator=seeded(1), dtype=torch.float64)
    codes, counts = CODEBOOK, COUNTS
    sums, numbers = COUNTS[:, None] * CODEBOOK, COUNTS
    for batch in z:
        chosen = torch.nn.functional.one_hot(nearest_codes(batch, codes), 3).double()
        codes, counts = averaged_codebook(codes, counts, batch, chosen.argmax(1), decay=0.7)
        sums, numbers = 0.7 * sums + 0.3 * chosen.T @ batch, 0.7 * numbers + 0.3 * chosen.sum(0)
        torch.testing.assert_close(codes, sums / numbers[:, None])
        torch.testing.assert_close(counts, numbers)


def test_a_code_that_nobody_chooses_stays_where_it_is_for_ever():
    codes, counts = torch.tensor([[0.0], [9.0]]), torch.ones(2)
    for _ in range(2000):
        codes, counts = averaged_codebook(codes, counts, torch.tensor([[0.5]]), torch.tensor([0]), decay=0.9)
    assert codes[1].item() == 9
    assert counts[1].item() < 1e-30
    assert codes[0].item() == pytest.approx(0.5)


def test_half_precision_is_not_averaged():
    with pytest.raises(ValueError, match=r"`codebook` should be of float32 or float64 to be averaged. Found torch.bf"):
        VectorQuantizer(2, 3).to(torch.bfloat16)(torch.zeros(4, 2, dtype=torch.bfloat16))


def test_codes_learn_by_their_loss_as_by_its_written_gradient():
    quantizer = VectorQuantizer(3, 5, learning="loss", commitment=0.5, generator=seeded())
    z = torch.randn(40, 3, generator=seeded(1), requires_grad=True)
    _, indices, loss = quantizer(z)
    slope_z, slope_codes = torch.autograd.grad(loss, [z, quantizer.codebook])
    d = (z - quantizer.codebook[indices]).detach()
    torch.testing.assert_close(slope_z, 2 * 0.5 * d / z.numel())
    expected = torch.zeros(5, 3).index_add(0, indices, -2 * d / z.numel())
    torch.testing.assert_close(slope_codes, expected)


@pytest.mark.parametrize("learning", ["average", "loss"])
def test_nothing_moves_in_evaluation_and_the_gradient_is_the_same(learning):
    quantizer = VectorQuantizer(3, 5, learning=learning, restart_below=2.0, generator=seeded())
    z = torch.randn(40, 3, generator=seeded(1), requires_grad=True)
    before = copy.deepcopy(quantizer.state_dict())
    slopes = []
    for mode in (False, True):
        codes, _, loss = quantizer.train(mode)(z, generator=seeded(2))
        slopes.append(torch.autograd.grad(codes.square().sum() + loss, z)[0])
        same = [torch.equal(value, before[name]) for name, value in quantizer.state_dict().items()]
        assert not any(same) if mode else all(same)
    assert torch.equal(*slopes)


def test_an_empty_batch_moves_nothing():
    quantizer = VectorQuantizer(3, 5, restart_below=2.0, generator=seeded())
    before = copy.deepcopy(quantizer.state_dict())
    codes, indices, _ = quantizer(torch.zeros(0, 3))
    assert codes.shape == (0, 3)
    assert indices.shape == (0,)
    assert all(torch.equal(value, before[name]) for name, value in quantizer.state_dict().items())


def test_a_codebook_that_is_set_stays_set():
    quantizer = VectorQuantizer(2, 3, decay=1.0)
    quantizer.codebook.copy_(CODEBOOK)
    quantizer(BATCH.float())
    assert torch.equal(quantizer.codebook, CODEBOOK.float())


def test_dead_codes_are_restarted_and_used_ones_are_not():
    """Data at a distance: of random codes, only the nearest few would ever be chosen."""
    used = {}
    for below in (0.0, 2.0):
        quantizer = VectorQuantizer(16, 128, decay=0.8, restart_below=below, generator=seeded())
        draws = seeded(1)
        for _ in range(30):
            z = 3 + torch.randn(2048, 16, generator=draws)
            _, indices, _ = quantizer(z, generator=draws)
        used[below] = len(indices.unique())
    assert used[0.0] <= 20
    assert used[2.0] >= 100


def test_a_restarted_code_is_a_vector_of_the_batch_with_a_new_count():
    z = torch.randn(10, 2, generator=seeded(1))
    for learning in ("average", "loss"):
        quantizer = VectorQuantizer(2, 3, decay=0.5, restart_below=1.5, learning=learning, generator=seeded())
        with torch.no_grad():
            quantizer.codebook.copy_(torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 70.0]]))
        quantizer(z, generator=seeded(2))
        for code in (1, 2):
            assert (quantizer.codebook[code] == z).all(1).any()
        assert quantizer.counts.tolist() == [5.5, 1.5, 1.5]


@pytest.mark.parametrize("estimator", ["straight_through", "rotation"])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("learning", ["average", "loss"])
def test_passes_before_one_backward_pass_leave_its_graph_as_it_was(learning, metric, estimator):
    """A restart writes into the codebook, also when an earlier pass still needs its directions."""
    choices = {"learning": learning, "metric": metric, "estimator": estimator}
    z = torch.randn(8, 2, generator=seeded(1), requires_grad=True)
    found = []
    for below in (0.0, 20.0):  # no code and every code is restarted
        quantizer = VectorQuantizer(2, 3, **choices, restart_below=below, generator=seeded())
        codes, _, loss = quantizer(z)
        if below:
            assert not torch.equal(quantizer(2 * z).codes, codes)
        found.append(torch.autograd.grad(codes.square().sum() + loss, [z, *quantizer.parameters()]))
    assert all(torch.equal(alone, before) for alone, before in zip(*found, strict=True))


@pytest.mark.parametrize("learning", ["average", "loss"])
def test_a_start_by_k_means_uses_all_codes(learning):
    z = 5 + torch.randn(300, 4, generator=seeded(1))
    quantizer = VectorQuantizer(4, 16, learning=learning, generator=seeded())
    quantizer.start(z, generator=seeded(2))
    assert torch.equal(quantizer.codebook, kmeans_codebook(z, 16, generator=seeded(2)))
    assert not quantizer.codebook.grad_fn
    assert len(quantizer(z).indices.unique()) == 16


def test_the_start_is_a_constant_also_with_an_open_block():
    z = torch.randn(20, 2, generator=seeded(1), requires_grad=True)
    assert not kmeans_codebook(2 * z, 3, generator=seeded(2)).requires_grad


def test_an_open_block_keeps_the_graph_of_the_batches():
    z = torch.randn(20, 2, generator=seeded(1), requires_grad=True)
    quantizer = VectorQuantizer(2, 3, generator=seeded())
    quantizer(z)
    assert not quantizer.codebook.requires_grad
    with unblock(AVERAGES):
        quantizer(z)
    assert quantizer.codebook.requires_grad


def test_a_comparison_leaves_the_codebook_as_it_was():
    quantizer = VectorQuantizer(2, 3, generator=seeded())
    z = torch.randn(20, 2, generator=seeded(1), requires_grad=True)
    before = copy.deepcopy(quantizer.state_dict())
    comparison = compare(lambda: quantizer(z).codes.square().sum(), {"z": z})
    assert {effect.name for effect in comparison.effects} >= {STRAIGHT_THROUGH.name, AVERAGES.name}
    assert all(torch.equal(value, before[name]) for name, value in quantizer.state_dict().items())


def test_cosine_codes_are_directions():
    quantizer = VectorQuantizer(3, 6, metric="cosine", learning="loss", generator=seeded())
    z = torch.randn(40, 3, generator=seeded(1), requires_grad=True)
    codes, indices, loss = quantizer(z)
    directions = torch.nn.functional.normalize(quantizer.codebook, dim=-1)
    assert torch.equal(indices, (z @ directions.T).argmax(1))
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(40))
    torch.testing.assert_close(quantizer.codes_of(indices), codes)
    (slope,) = torch.autograd.grad(codes.square().sum() + codes.sum() + loss, z)
    torch.testing.assert_close((slope * z).sum(-1), torch.zeros(40), rtol=0, atol=1e-5)  # across z alone
    assert torch.equal(quantizer(7 * z).indices, indices)
    assert quantizer(torch.zeros(1, 3)).codes.isfinite().all()


def test_a_vector_without_a_direction_has_no_gradient():
    z = torch.zeros(1, 3, requires_grad=True)
    codes, _, loss = VectorQuantizer(3, 6, metric="cosine", generator=seeded())(z)
    assert torch.autograd.grad(codes.sum() + loss, z)[0].tolist() == [[0, 0, 0]]


def test_averaged_cosine_codes_are_mean_directions():
    quantizer = VectorQuantizer(2, 2, metric="cosine", decay=0.0, generator=seeded())
    quantizer.codebook.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    z = torch.tensor([[5.0, 0.0], [0.3, 0.2], [0.0, 2.0]])
    quantizer(z)
    mean = torch.nn.functional.normalize(z[:2], dim=-1).mean(0)
    torch.testing.assert_close(quantizer.codes_of(torch.tensor(0)), mean / mean.norm())


def test_codes_of_half_precision_inputs_are_of_half_precision():
    quantizer = VectorQuantizer(4, 8, generator=seeded())
    z = torch.randn(10, 4, generator=seeded(1)).bfloat16().requires_grad_()
    codes, _, loss = quantizer(z)
    assert codes.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    (codes.float().sum() + loss).backward()
    assert z.grad.isfinite().all()


def test_a_quantizer_is_made_on_the_device_of_the_context():
    with torch.device("meta"):
        quantizer = VectorQuantizer(4, 8, generator=seeded())
    assert {value.device.type for value in quantizer.state_dict().values()} == {"meta"}


def test_a_quantizer_is_saved_and_loaded():
    quantizer = VectorQuantizer(4, 8, generator=seeded())
    quantizer(torch.randn(50, 4, generator=seeded(1)))
    other = VectorQuantizer(4, 8, generator=seeded(5))
    other.load_state_dict(quantizer.state_dict())
    z = torch.randn(50, 4, generator=seeded(2))
    assert torch.equal(quantizer(z).codes, other(z).codes)
    assert torch.equal(quantizer.codebook, other.codebook)
    assert repr(other) == "VectorQuantizer(4, 8, learning='average', estimator='straight_through')"


@pytest.mark.parametrize(
    ("indices", "expected"), [([1, 1, 1], 1), (list(range(8)), 8), ([0, 0, 0, 1], 4 / 27**0.25), ([], math.nan)]
)
def test_perplexity_is_the_number_of_codes_in_equal_use(indices, expected):
    found = codebook_perplexity(torch.tensor(indices, dtype=torch.int64), 8)
    assert found.item() == pytest.approx(expected, nan_ok=True)


def test_perplexity_counts_further_than_float32():
    """Ones of float32 add up to 2^24 at most."""
    indices = torch.zeros((), dtype=torch.int32).expand(2**24 + 2**22)
    assert codebook_perplexity(indices, 2) == 1


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("device", [pytest.param(ACCELERATOR, marks=pytest.mark.gpu)])
def test_gradients_on_a_device(case, device, monkeypatch):
    expected = gradients(case.loss, case.parameters())
    on_device = {name: value.detach().to(device).requires_grad_() for name, value in case.parameters().items()}
    for name in ("GOAL", "CODEBOOK", "COUNTS", "WEIGHTS", "SLOPE", "COTANGENT"):
        monkeypatch.setitem(globals(), name, globals()[name].to(device))
    with torch.device(device):
        found = gradients(case.loss, on_device)
    for name, slopes in expected.items():
        assert found[name] == pytest.approx(slopes, abs=1e-12)


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VectorQuantizer(0, 3), "`dim` should be a positive integer. Found 0."),
        (lambda: VectorQuantizer(2, 3, decay=1.5), "`decay` should be from 0 to 1. Found 1.5."),
        (lambda: VectorQuantizer(2, 3, commitment=-1), "`commitment` should be finite and not negative. Found -1."),
        (lambda: VectorQuantizer(2, 3, learning="ema"), "`learning` should be one of 'average', 'loss'. Found 'ema'."),
        (lambda: VectorQuantizer(2, 3, estimator="ste"), "`estimator` should be one of"),
        (lambda: VectorQuantizer(2, 3, metric="dot"), "`metric` should be one of"),
        (lambda: VectorQuantizer(2, 3)(torch.zeros(4, 3)), r"`z` should have shape \(..., 2\). Found"),
        (
            lambda: VectorQuantizer(2, 3)(torch.zeros(4, 2).long()),
            r"`z` should be a floating-point tensor. Found torch.int64.",
        ),
        (lambda: VectorQuantizer(2, 3).start(torch.zeros(2, 2)), "`codebook_size` should be an integer from 1 to 2."),
        (lambda: ResidualVectorQuantizer(2, 3, 0), "`n_quantizers` should be a positive integer. Found 0."),
        (lambda: ResidualVectorQuantizer(2, 3, 2, estimator="x"), "`estimator` should be one of"),
        (
            lambda: ResidualVectorQuantizer(2, 3, 2).codes_of(torch.zeros(4, 3).long()),
            r"`indices` should have shape \(..., m\), m from 1 to 2. Found \(4, 3\).",
        ),
        (
            lambda: straight_through(BATCH, BATCH[0]),
            r"`codes` should have the shape of `z`, .* Found \(2,\)",
        ),
        (lambda: rotation_trick(BATCH, BATCH[0]), "`codes` should have the shape of `z`"),
        (lambda: codebook_loss(BATCH, BATCH[0]), "`codes` should have the shape of `z`"),
        (lambda: commitment_loss(BATCH, BATCH[0]), "`codes` should have the shape of `z`"),
        (
            lambda: averaged_codebook(CODEBOOK, COUNTS, BATCH, torch.zeros(3, 1).long(), decay=0.5),
            r"`indices` should have shape \(3,\). Found \(3, 1\).",
        ),
        (
            lambda: averaged_codebook(CODEBOOK, COUNTS[:1], BATCH, torch.zeros(3).long(), decay=0.5),
            r"`counts` should have shape \(3,\). Found \(1,\).",
        ),
        (
            lambda: restarted_codebook(CODEBOOK, COUNTS[:, None], BATCH, below=1.0),
            r"`counts` should have shape \(3,\). Found \(3, 1\).",
        ),
        (lambda: nearest_codes(Z, Z), r"`codebook` should have shape \(K, D\). Found \(2,\)."),
        (
            lambda: restarted_codebook(CODEBOOK, COUNTS, BATCH[:0], below=1.0),
            r"`z` should have vectors. Found \(0, 2\).",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
