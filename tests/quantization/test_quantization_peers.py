"""Live peers: value and gradient beside torch, vector-quantize-pytorch and snntorch, and where those are wrong.

The last two are in the dependency group ``gallery-peers``; their tests are skipped without them.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from toolkit.quantization import (
    FiniteScalarQuantizer,
    ResidualVectorQuantizer,
    VectorQuantizer,
    arctan_slope,
    fast_sigmoid_slope,
    gumbel_softmax,
    leaky_integrate_and_fire,
    nearest_codes,
    rotation_trick,
    sigmoid_slope,
    spike,
)


def _imported(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture(scope="module")
def vqp() -> ModuleType:
    return _imported("vector_quantize_pytorch")


@pytest.fixture(scope="module")
def snn() -> ModuleType:
    return _imported("snntorch")


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result and the gradient of a cotangent that is symmetric in nothing."""
    x = x.clone().requires_grad_()
    y = function(x)
    return y, torch.autograd.grad(y, x, draw(*y.shape, seed=9, dtype=y.dtype))[0]


def assert_same(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for found, expected in zip(value_and_gradient(ours, x), value_and_gradient(theirs, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def near(codebook: Tensor, n: int) -> Tensor:
    """Return vectors close to codes, so that rounding does not change the nearest one."""
    return codebook[torch.arange(n) % len(codebook)] + 0.05 * draw(n, codebook.shape[1], seed=5)


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_gumbel_softmax_is_that_of_torch(dtype, tau):
    def seeded(function):
        def draws(x):
            torch.manual_seed(4)
            return function(x)

        return draws

    assert_same(
        seeded(lambda x: gumbel_softmax(x, temperature=tau)),
        seeded(lambda x: functional.gumbel_softmax(x, tau, hard=True)),
        draw(50, 7, dtype=dtype),
    )


# --- vector-quantize-pytorch -----------------------------------------------------------------------------------------


def test_the_rotation_is_that_of_the_peer_but_where_a_vector_is_zero(vqp):
    rotate_to = inspect.getmodule(vqp.VectorQuantize).rotate_to
    e = draw(30, 6, seed=2, dtype=torch.float64)
    z = draw(30, 6, dtype=torch.float64)
    assert_same(lambda z: rotation_trick(z, e), lambda z: rotate_to(z, e), z)

    zero = torch.zeros(1, 6, dtype=torch.float64)
    value, gradient = value_and_gradient(lambda z: rotation_trick(z, e[:1]), zero)
    assert torch.equal(value, e[:1])
    assert gradient.norm() < 10
    theirs, their_gradient = value_and_gradient(lambda z: rotate_to(z, e[:1]), zero)
    assert not torch.allclose(theirs, e[:1])
    assert their_gradient.norm() > 1e5


@pytest.mark.parametrize("levels", [[8, 5, 4], [7, 5, 5, 5], [3, 6]])
def test_finite_scalars_are_those_of_the_peer(vqp, levels):
    theirs, ours = vqp.FSQ(levels), FiniteScalarQuantizer(levels)
    z = draw(2, 40, len(levels))
    assert_same(lambda z: ours(z).codes, lambda z: theirs(z)[0], z)
    assert torch.equal(ours(z).indices, theirs(z)[1].long())
    torch.testing.assert_close(ours.codes_of(ours(z).indices), theirs.indices_to_codes(theirs(z)[1]))


def test_the_peer_has_finite_scalars_beyond_the_last_level(vqp):
    """Of 1024 levels the index is that of another code."""
    z = torch.tensor([[[50.0, 0.0]]])
    _, theirs = vqp.FSQ([1024, 3])(z)
    decoded = vqp.FSQ([1024, 3]).indices_to_codes(theirs)
    assert decoded.flatten().tolist() == [-1, 1]
    ours = FiniteScalarQuantizer([1024, 3])
    codes, indices = ours(z)
    assert codes.flatten().tolist() == [511 / 512, 0]
    assert torch.equal(ours.codes_of(indices), codes)


def test_averaged_codes_are_those_of_the_peer(vqp):
    codebook = draw(5, 3)
    theirs = vqp.VectorQuantize(dim=3, codebook_size=5, decay=0.8, commitment_weight=0.3, rotation_trick=False, eps=0.0)
    ours = VectorQuantizer(3, 5, decay=0.8, commitment=0.3)
    state = theirs._codebook
    for buffer, value in (
        (state.embed, codebook[None]),
        (state.embed_avg, codebook[None]),
        (state.cluster_size, torch.ones(1, 5)),
        (ours.codebook, codebook),
    ):
        buffer.copy_(value)
    for seed in range(4):
        z = near(ours.codebook, 40) + 0.01 * draw(40, 3, seed=seed)
        assert_same(lambda z: ours.eval()(z).codes, lambda z: theirs.train()(z[None])[0][0], z)
        ours.train()(z)
        torch.testing.assert_close(ours.codebook, theirs.codebook, rtol=1e-5, atol=1e-6)
        loss, their_loss = (
            value_and_gradient(function, z)
            for function in (lambda z: ours.eval()(z).loss, lambda z: theirs.train()(z[None])[2].sum())
        )
        torch.testing.assert_close(loss, their_loss, rtol=1e-3, atol=1e-6)
        ours.codebook.copy_(theirs.codebook)
        ours.counts.copy_(state.cluster_size[0])


def test_the_peer_trains_learnt_codes_with_the_weight_of_the_commitment(vqp):
    """The paper's two losses have weights 1 and beta; the peer has beta for both, and with 0 trains no code."""
    codebook = draw(5, 3)
    theirs = vqp.VectorQuantize(
        dim=3, codebook_size=5, commitment_weight=0.3, rotation_trick=False, learnable_codebook=True, ema_update=False
    )
    ours = VectorQuantizer(3, 5, commitment=0.3, learning="loss")
    with torch.no_grad():
        theirs._codebook.embed.copy_(codebook[None])
        ours.codebook.copy_(codebook)
    z = near(codebook, 40).requires_grad_()
    of_z, of_codes = torch.autograd.grad(ours(z).loss, [z, ours.codebook])
    their_z, their_codes = torch.autograd.grad(theirs(z[None])[2].sum(), [z, theirs._codebook.embed])
    torch.testing.assert_close(of_z, their_z, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(0.3 * of_codes, their_codes[0], rtol=1e-5, atol=1e-7)


def test_the_peer_forgets_a_codebook_that_is_set(vqp):
    codebook = torch.tensor([[0.0, 1.0], [1.0, 0.5], [-1.0, 2.0]])
    theirs = vqp.VectorQuantize(dim=2, codebook_size=3, rotation_trick=False).train()
    theirs.codebook = codebook
    theirs(codebook[None])
    assert not torch.allclose(theirs.codebook, codebook, atol=0.05)
    ours = VectorQuantizer(2, 3, decay=0.8)
    ours.codebook.copy_(codebook)
    ours(codebook)  # each code is the mean of its vectors
    torch.testing.assert_close(ours.codebook, codebook)


def test_the_peer_has_no_gradient_in_evaluation(vqp):
    z = draw(1, 6, 3).requires_grad_()
    assert not vqp.VectorQuantize(dim=3, codebook_size=4).eval()(z)[0].requires_grad
    assert VectorQuantizer(3, 4).eval()(z).codes.requires_grad


def test_the_peer_loses_vectors_with_a_common_offset(vqp):
    codebook = draw(64, 8)
    z = codebook[torch.arange(500) % 64] + 0.2 * draw(500, 8, seed=2)
    expected = nearest_codes(z.double(), codebook.double())
    theirs = vqp.VectorQuantize(dim=8, codebook_size=64).eval()
    theirs._codebook.embed.copy_(codebook[None] + 1e4)
    found = theirs(z[None] + 1e4)[1][0]
    assert (found == expected).double().mean() < 0.5
    assert (nearest_codes(z + 1e4, codebook + 1e4) == expected).double().mean() > 0.99


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_residual_peer_multiplies_the_gradient_by_the_number_of_quantizers(vqp, n):
    z = draw(1, 20, 4).requires_grad_()
    theirs = vqp.ResidualVQ(dim=4, codebook_size=8, num_quantizers=n, rotation_trick=False).train()
    codes, _, losses = theirs(z)
    (gradient,) = torch.autograd.grad(codes.sum(), z, retain_graph=True)
    torch.testing.assert_close(gradient, torch.full_like(z, n), rtol=1e-5, atol=1e-5)
    of_losses = [torch.autograd.grad(loss, z, retain_graph=True)[0].norm().item() for loss in losses.unbind(-1)]
    assert min(of_losses) > 0

    ours = ResidualVectorQuantizer(4, 8, n, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(ours(z).codes.sum(), z)
    assert torch.equal(gradient, torch.ones_like(z))


def test_the_residual_peer_without_the_block_commits_to_the_first_code_alone(vqp):
    z = draw(1, 20, 4).requires_grad_()
    theirs = vqp.ResidualVQ(dim=4, codebook_size=8, num_quantizers=4, rotation_trick=False, quant_grad_frac=1.0).train()
    codes, _, losses = theirs(z)
    (gradient,) = torch.autograd.grad(codes.sum(), z, retain_graph=True)
    torch.testing.assert_close(gradient, torch.ones_like(z), rtol=1e-5, atol=1e-5)
    of_losses = [torch.autograd.grad(loss, z, retain_graph=True)[0].norm().item() for loss in losses.unbind(-1)]
    assert of_losses[0] > 1e-3
    assert max(of_losses[1:]) < 1e-6


# --- snntorch --------------------------------------------------------------------------------------------------------

CURRENTS = torch.tensor([0.9, 0.6, 0.8, 0.3, 1.4, 0.7])


@pytest.mark.parametrize("reset", ["subtract", "zero", "none"])
def test_a_layer_is_that_of_the_peer(snn, reset):
    neuron = snn.Leaky(beta=0.8, reset_mechanism=reset)

    def theirs(w: Tensor) -> Tensor:
        potential, found = neuron.init_leaky(), []
        for current in CURRENTS:
            spiked, potential = neuron(w * current, potential)
            found += [spiked, potential]
        return torch.stack(found)

    def ours(w: Tensor) -> Tensor:
        spikes, potentials = leaky_integrate_and_fire(CURRENTS[:, None] * w, decay=0.8, reset=reset)
        return torch.stack([spikes, potentials], 1).flatten(0, 1)

    assert_same(ours, theirs, torch.tensor([1.3, 0.7, 2.1]))


@pytest.mark.parametrize(
    ("name", "slope"),
    [("atan", arctan_slope), ("fast_sigmoid", fast_sigmoid_slope), ("sigmoid", sigmoid_slope)],
)
def test_slopes_are_those_of_the_peer(snn, name, slope):
    theirs = getattr(_imported("snntorch.surrogate"), name)()
    assert_same(lambda x: spike(x, slope), theirs, draw(100))


def test_the_peers_sigmoid_overflows(snn):
    x = torch.tensor([-8.0])
    theirs = _imported("snntorch.surrogate").sigmoid(slope=25)
    assert value_and_gradient(theirs, x)[1].isnan().all()
    assert value_and_gradient(lambda x: spike(x, sigmoid_slope), x)[1].abs().item() < 1e-30


def test_the_peer_documents_another_slope_than_it_has(snn):
    """Its formula has 1 / pi in front."""
    theirs = _imported("snntorch.surrogate").atan(alpha=2.0)
    x = torch.tensor([0.2], requires_grad=True)
    (found,) = torch.autograd.grad(theirs(x), x)
    assert found.item() == pytest.approx(1 / (1 + (math.pi * 0.2) ** 2), rel=1e-6)


def test_the_peer_ignores_a_reset_that_is_set_later(snn):
    neuron = snn.Leaky(beta=0.5, reset_mechanism="zero")
    neuron.reset_mechanism = "none"
    _, potential = neuron(torch.tensor([0.3]), torch.tensor([2.0]))
    assert potential.item() == pytest.approx(0.3)
