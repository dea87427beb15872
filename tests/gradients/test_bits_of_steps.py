"""Recorded steps keep the bits of the plain step where torch computes in another way for values with a gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from toolkit import stop_gradient, stop_recording
from toolkit.gradients import audited, field_jacobian

# A mode under the tests would compute in an order of its own.
pytestmark = pytest.mark.keeps_its_sums


def _stack(rows, columns, *, seed=0):
    """A stack of matrices with gaps: torch makes one matrix of it only for a matrix that requires a gradient."""
    torch.manual_seed(seed)
    return torch.randn(5, columns, rows).transpose(1, 2)


class _Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class _Product(nn.Module):
    def __init__(self, matrix, *, is_left=False):
        super().__init__()
        self.matrix, self.is_left = nn.Parameter(matrix), is_left

    def forward(self, x):
        matrix = self.matrix * 1
        return matrix @ x if self.is_left else x @ matrix


class _Measure(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(9, 9)), function

    def forward(self, x):
        return self.function(self.weight * 1) * x


TEACHERS = {
    "lstm": lambda: (nn.LSTM(50, 24, 2, dropout=0.3, batch_first=True), _stack(33, 50)),
    "gru": lambda: (nn.GRU(50, 24, batch_first=True), _stack(33, 50)),
    "rnn": lambda: (nn.RNN(50, 24, batch_first=True), _stack(33, 50)),
    "attention": lambda: (_Attention(48, 4, dropout=0.1, batch_first=True), _stack(33, 48)),
    "linear": lambda: (nn.Linear(513, 65), _stack(33, 513)),
    "product": lambda: (_Product(torch.randn(513, 65)), _stack(33, 513)),
    "product with a vector": lambda: (_Product(torch.randn(50)), _stack(33, 50)),
    "product from the left": lambda: (_Product(torch.randn(65, 33), is_left=True), _stack(33, 513)),
    "singular values": lambda: (_Measure(torch.linalg.svdvals), _stack(4, 9)),
    "eigenvalues": lambda: (_Measure(lambda w: torch.linalg.eigvalsh(w @ w.T)), _stack(4, 9)),
    "nuclear norm": lambda: (_Measure(lambda w: torch.linalg.matrix_norm(w, "nuc")), _stack(4, 9)),
    "norm by its method": lambda: (_Measure(lambda w: w.norm(p="nuc")), _stack(4, 9)),
    "condition": lambda: (_Measure(torch.linalg.cond), _stack(4, 9)),
}


def _first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("region", [torch.no_grad, lambda: stop_recording("bits.region")], ids=["no_grad", "declared"])
@pytest.mark.parametrize("kind", TEACHERS)
def test_values_of_a_region(kind, region):
    torch.manual_seed(1)
    teacher, x = TEACHERS[kind]()
    torch.manual_seed(2)
    with region():
        plain = _first(teacher(x))
    drawn = torch.rand(3)
    torch.manual_seed(2)
    scale = torch.ones((), requires_grad=True)
    with audited({"scale": scale, **dict(teacher.named_parameters())}) as answer:
        with region():
            recorded = _first(teacher(x))
        assert torch.equal(torch.rand(3), drawn)
        (recorded * scale).square().mean().backward()
    assert torch.equal(recorded, plain)
    assert answer.audits[0].effects[0].leak > 0


@pytest.mark.parametrize("kind", [kind for kind in TEACHERS if kind not in ("lstm", "gru", "rnn", "attention")])
def test_values_and_gradients_with_a_stopped_matrix(kind):
    torch.manual_seed(1)
    layer, x = TEACHERS[kind]()
    x = nn.Parameter(x.transpose(1, 2).contiguous())

    def step(gradients):
        stopped = {name: (parameter * 1).detach() for name, parameter in layer.named_parameters()}
        loss = functional_call(layer, stopped, x.transpose(1, 2)).square().mean()
        x.grad = None
        loss.backward()
        gradients.append((loss.detach(), x.grad))

    found = []
    step(found)
    with audited({"x": x, **dict(layer.named_parameters())}) as answer:
        step(found)
    (loss, gradient), (recorded, gradient_recorded) = found
    assert torch.equal(loss, recorded)
    assert torch.equal(gradient, gradient_recorded)
    assert answer.audits[0].effects[0].leak > 0


def test_a_stopped_matrix_inside_of_a_checkpoint_is_refused():
    torch.manual_seed(1)
    x, w = nn.Parameter(torch.randn(5, 50, 33)), nn.Parameter(torch.randn(50))

    def product(x, w):
        return x.transpose(1, 2) @ (w * 1).detach()

    with audited({"x": x, "w": w}):
        with pytest.raises(RuntimeError, match=r"test_bits_of_steps\.py:\d+:\d+: a checkpoint multiplies by it"):
            checkpoint(product, x, w, use_reentrant=False)


def test_a_stopped_mask_of_an_attention_is_refused():
    torch.manual_seed(1)
    q, bias = nn.Parameter(torch.randn(2, 4, 6, 8)), nn.Parameter(torch.randn(6, 6))
    with audited({"q": q, "bias": bias}):
        mask = stop_gradient(bias * 1, "bits.mask")
        with pytest.raises(RuntimeError, match=r"bits\.mask: an attention takes it as a mask"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_stopped_targets_of_a_cross_entropy_in_chunks_are_refused():
    torch.manual_seed(1)
    hidden, head, options = nn.Parameter(torch.randn(8, 3)), nn.Linear(3, 4), nn.LinearCrossEntropyOptions()

    def loss():
        targets = stop_gradient(head(hidden).softmax(-1), "bits.targets")
        return F.linear_cross_entropy(hidden, head.weight, targets, options=options)

    with audited({"hidden": hidden, **dict(head.named_parameters())}):
        with pytest.raises(RuntimeError, match=r"bits\.targets: a cross entropy in chunks takes it as its targets"):
            loss()


def test_the_field_of_a_program_with_a_recurrent_layer_in_a_region():
    torch.manual_seed(1)
    teacher, x = TEACHERS["lstm"]()
    student = nn.Linear(50, 1, bias=False)

    def loss():
        with stop_recording("bits.region"):
            held = teacher(x)[0]
        return (student(x) - held).square().mean()

    teacher.eval()
    assert field_jacobian(loss, student).asymmetry <= 1e-6
