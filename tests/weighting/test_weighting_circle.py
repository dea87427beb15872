"""Circle loss: the blocked gradient is the paper's; open, the optimum moves from the margins to 0 and 1."""

import pytest
import torch
from contract import BlockCase
from values import doubles, gradients, leaves, values_of, witness

from toolkit import unblock
from toolkit.gradients import field_jacobian
from toolkit.weighting import CIRCLE_WEIGHTS, circle_loss, circle_loss_of_similarities

M, GAMMA = 0.25, 8.0
PAIRS = leaves(positive=(0.8, 0.6), negative=(0.3, -0.1, 0.5))
LABELS = torch.tensor([0, 1, 0, 1, 1, 2])


_embeddings = leaves(
    embeddings=(
        (0.3, -1.2, 0.8, 0.5),
        (-0.7, 0.4, 1.1, -0.2),
        (0.9, 0.1, -0.6, 1.4),
        (-0.3, 1.5, 0.2, 0.6),
        (1.2, 0.7, 0.9, -1.0),
        (-1.1, -0.4, 0.3, 0.8),
    )
)


def _loss(p):
    return circle_loss_of_similarities(p["positive"], p["negative"], m=M, gamma=GAMMA)


def _slopes(of_positive, of_negative):
    def formula(positive, negative):
        to_p, to_n = -GAMMA * (1 + M - positive) * (positive - 1 + M), GAMMA * (negative + M) * (negative - M)
        total = torch.logsumexp(to_p, -1) + torch.logsumexp(to_n, -1)
        z = torch.sigmoid(total)
        return {
            "positive": -z * torch.softmax(to_p, -1) * GAMMA * of_positive(positive),
            "negative": z * torch.softmax(to_n, -1) * GAMMA * of_negative(negative),
        }

    return witness(formula)


def _anchor_by_anchor(embeddings, weights):
    """Return the mean circle loss, every anchor for itself; `weights` may hold the weights."""
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    losses = []
    for i in range(len(unit)):
        cosines = [(unit[i] @ unit[j], bool(LABELS[i] == LABELS[j])) for j in range(len(unit)) if j != i]
        positive = [-GAMMA * weights(1 + M - s) * (s - 1 + M) for s, same in cosines if same]
        negative = [GAMMA * weights(s + M) * (s - M) for s, same in cosines if not same]
        if positive and negative:
            losses.append((1 + sum(x.exp() for x in positive) * sum(x.exp() for x in negative)).log())
    return torch.stack(losses).mean()


def _by_anchor(weights):
    def formula(parameters):
        embeddings = parameters["embeddings"].detach().clone().requires_grad_()
        return gradients(_anchor_by_anchor(embeddings, weights), {"embeddings": embeddings})

    return formula


BLOCK_CASES = [
    BlockCase(
        id="weighting circle similarities",
        block=CIRCLE_WEIGHTS,
        parameters=PAIRS,
        loss=_loss,
        blocked=_slopes(lambda s: 1 + M - s, lambda s: s + M),
        opened=_slopes(lambda s: 2 * (1 - s), lambda s: 2 * s),
    ),
    BlockCase(
        id="weighting circle embeddings",
        block=CIRCLE_WEIGHTS,
        parameters=_embeddings,
        loss=lambda p: circle_loss(p["embeddings"], LABELS, m=M, gamma=GAMMA),
        blocked=_by_anchor(lambda w: w.detach().clamp(min=0)),
        opened=_by_anchor(lambda w: w.clamp(min=0)),
    ),
]

PEER_CASES = {"circle": (values_of(PAIRS()), {}, lambda p, c: _loss(p))}


def test_numbers():
    p = PAIRS()
    assert _loss(p).item() == pytest.approx(3.008714412, abs=1e-9)
    found = gradients(_loss(p), p)
    torch.testing.assert_close(found["positive"], doubles(-0.9475662496, -3.574646736), rtol=0, atol=1e-8)
    torch.testing.assert_close(found["negative"], doubles(0.8163335285, 0.1173944959, 4.003714906), rtol=0, atol=1e-8)
    with unblock(CIRCLE_WEIGHTS):
        found = gradients(_loss(p), p)
    torch.testing.assert_close(found["positive"], doubles(-0.8422811108, -4.399565213), rtol=0, atol=1e-8)
    torch.testing.assert_close(found["negative"], doubles(0.8905456674, -0.1565259946, 5.338286542), rtol=0, atol=1e-8)


def test_blocked_gradient_is_that_of_no_loss():
    p = PAIRS()
    field = field_jacobian(lambda: _loss(p), p)
    assert not field.is_gradient_field
    assert field.asymmetry == pytest.approx(0.1180891684, abs=1e-9)


def test_anchors_without_a_pair_count_nothing():
    e = _embeddings()["embeddings"]
    alone = circle_loss(e[:3], torch.tensor([0, 1, 2]))
    assert alone == 0
    assert torch.autograd.grad(alone, e)[0].eq(0).all()
    alike = circle_loss(e[:3], torch.tensor([0, 0, 0]))
    assert alike == 0
    assert torch.autograd.grad(alike, e)[0].eq(0).all()
    empty = circle_loss_of_similarities(torch.zeros(2, 0), torch.zeros(2, 3))
    assert empty.tolist() == [0, 0]


def test_an_optimal_pair_has_no_weight():
    p = leaves(positive=(1.5, 0.8), negative=(-0.5, 0.2))()
    found = gradients(_loss(p), p)
    assert found["positive"][0] == 0
    assert found["negative"][0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_large_scales_stay_finite(dtype):
    e = _embeddings()["embeddings"].to(dtype).detach().requires_grad_()
    (found,) = torch.autograd.grad(circle_loss(e, LABELS, gamma=512), e)
    assert found.isfinite().all()
    opposite = torch.tensor([[1.0, 0], [-1, 0], [1, 0]], dtype=dtype, requires_grad=True)
    loss = circle_loss(opposite, torch.tensor([0, 0, 1]), gamma=512)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, opposite)[0].isfinite().all()


def test_batches_are_rows():
    positive, negative = torch.rand(5, 2, 3, dtype=torch.float64), torch.rand(5, 2, 4, dtype=torch.float64)
    found = circle_loss_of_similarities(positive, negative)
    assert found.shape == (5, 2)
    for i in range(5):
        torch.testing.assert_close(circle_loss_of_similarities(positive[i], negative[i]), found[i])
    torch.testing.assert_close(torch.func.vmap(circle_loss_of_similarities)(positive, negative), found)


@pytest.mark.keeps_its_sums
def test_compiled_is_eager():
    e = _embeddings()["embeddings"]
    compiled = torch.compile(circle_loss, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(e, LABELS), e)
    torch.testing.assert_close(found, torch.autograd.grad(circle_loss(e, LABELS), e)[0])


def test_an_embedding_without_a_direction_has_no_gradient():
    e = _embeddings()["embeddings"].detach().index_fill(0, torch.tensor([3]), 0).requires_grad_()
    (found,) = torch.autograd.grad(circle_loss(e, LABELS, m=M, gamma=GAMMA), e)
    assert found[3].tolist() == [0] * 4
    assert found[:3].abs().sum(1).gt(0).all()


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_angles_do_not_depend_on_the_size_of_embeddings(size):
    e = _embeddings()["embeddings"].detach().float()
    scaled = (e * size).requires_grad_()
    torch.testing.assert_close(circle_loss(scaled, LABELS, m=M, gamma=GAMMA), circle_loss(e, LABELS, m=M, gamma=GAMMA))
    (found,) = torch.autograd.grad(circle_loss(scaled, LABELS, m=M, gamma=GAMMA), scaled)
    (expected,) = torch.autograd.grad(circle_loss(e.requires_grad_(), LABELS, m=M, gamma=GAMMA), e)
    torch.testing.assert_close(found * size, expected, rtol=1e-4, atol=1e-5)


def test_missing_embeddings_are_not_hidden():
    """A loss that is no number counts as one: the network has diverged."""
    assert circle_loss(_embeddings()["embeddings"] * torch.nan, LABELS).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast_are_computed_in_float32(dtype):
    e = _embeddings()["embeddings"].detach().to(dtype)
    expected = circle_loss(e.double(), LABELS).float()
    torch.testing.assert_close(circle_loss(e, LABELS), expected)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(circle_loss(e.float(), LABELS), expected)
    positive, negative = torch.rand(3, 2).to(dtype), torch.rand(3, 4).to(dtype)
    torch.testing.assert_close(
        circle_loss_of_similarities(positive, negative),
        circle_loss_of_similarities(positive.double(), negative.double()).float(),
    )


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"`embeddings` and `labels` should have shapes .*Found \(2,\) and \(2,\)"):
        circle_loss(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"same leading dimensions. Found \(2, 1\) and \(3, 1\)"):
        circle_loss_of_similarities(torch.zeros(2, 1), torch.zeros(3, 1))
    for name in ("m", "gamma"):
        with pytest.raises(ValueError, match=f"`{name}` should be positive"):
            circle_loss(torch.zeros(2, 2), torch.zeros(2), **{name: 0})


# --- pytorch-metric-learning ---------------------------------------------------------------------------------------


@pytest.fixture
def peer():
    return pytest.importorskip("pytorch_metric_learning.losses").CircleLoss


def test_peer_has_the_same_value_and_gradient(peer):
    p = _embeddings()
    theirs, ours = (
        peer(m=M, gamma=GAMMA)(p["embeddings"], LABELS),
        circle_loss(p["embeddings"], LABELS, m=M, gamma=GAMMA),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    found = gradients(ours, p)["embeddings"]
    torch.testing.assert_close(found, gradients(theirs, p)["embeddings"], rtol=1e-6, atol=1e-9)


def test_peer_leaves_out_anchors_whose_loss_underflows(peer):
    """Its mean is over the losses that are not exactly 0, so it jumps when one of them is rounded to 0."""
    e = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0.42, 0.9075]])
    labels = torch.tensor([0, 0, 1, 1])
    each = [circle_loss_of_similarities(*pair, m=0.4, gamma=512).item() for pair in _pairs(e, labels)]
    assert each.count(0) == 1
    assert circle_loss(e, labels, gamma=512).item() == pytest.approx(sum(each) / 4)
    assert peer(gamma=512)(e, labels).item() == pytest.approx(sum(each) / 3)


def _pairs(e, labels):
    cosines = torch.nn.functional.normalize(e, dim=1)
    cosines = cosines @ cosines.T
    for i in range(len(e)):
        others = torch.arange(len(e)) != i
        same = labels == labels[i]
        yield cosines[i, others & same], cosines[i, ~same]
