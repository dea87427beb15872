"""Losses whose targets are a network's own answers: their gradients with each stop, without it, and in numbers."""

import math

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from each import each
from values import leaves

from toolkit import unblock
from toolkit.gradients import compare, field_jacobian
from toolkit.self_supervised import (
    BYOL_TARGET,
    DATA2VEC_TARGET,
    DINO_CENTER,
    DINO_TARGET,
    EMA_STUDENT,
    HARD_LABEL,
    MEAN_TEACHER_TARGET,
    MOCO_KEY,
    MOCO_QUEUE,
    SIMSIAM_TARGET,
    SOFT_LABEL,
    SWAV_CODES,
    byol_loss,
    data2vec_loss,
    dino_center,
    dino_loss,
    ema,
    enqueue,
    fixmatch_loss,
    mean_teacher_loss,
    moco_loss,
    negative_cosine_similarity,
    simsiam_loss,
    sinkhorn,
    soft_label_loss,
    swav_loss,
)

# --- points: asymmetric, made without torch's generators ----------------------------------------------------------


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def wave(*shape, phase, size=1.0):
    """Return numbers in no order: a sine at steps that never repeat."""
    steps = torch.arange(math.prod(shape), dtype=torch.float64)
    return (size * torch.sin(2.3 * steps + phase) + 0.1 * phase).reshape(shape)


def held(parameters):
    return {name: value.detach() for name, value in parameters.items()}


def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def entropy_gradient(weights, log_p):
    """Return the gradient of ``-sum_k w_k log p_k`` by the logits of w = softmax(logits)."""
    return -weights * (log_p - (weights * log_p).sum(-1, keepdim=True))


N = 2
EMBEDDINGS = {name: wave(N, 3, phase=phase) for name, phase in (("p1", 1.0), ("p2", 2.0), ("z1", 3.0), ("z2", 4.0))}

# --- SimSiam, BYOL ------------------------------------------------------------------------------------------------


def cosine_gradient(x, y):
    """Return the gradient of the sum of the cosines of x and y by x."""
    norm_x, norm_y = (v.pow(2).sum(-1, keepdim=True).sqrt() for v in (x, y))
    x, y = x / norm_x, y / norm_y
    return (y - (x * y).sum(-1, keepdim=True) * x) / norm_x


def simsiam_witness(is_open):
    def witness(parameters):
        v = held(parameters)
        found = {
            name: -0.5 * cosine_gradient(v[name], v[other]) / N
            for name, other in (("p1", "z2"), ("p2", "z1"), ("z1", "p2"), ("z2", "p1"))
        }
        return {name: value if is_open or name[0] == "p" else 0 * value for name, value in found.items()}

    return witness


def byol_witness(is_open):
    def witness(parameters):
        q, z = held(parameters).values()
        return {
            "prediction": -2 * cosine_gradient(q, z) / N,
            "projection": -2 * cosine_gradient(z, q) / N * is_open,
        }

    return witness


# --- the running average ------------------------------------------------------------------------------------------

PAST, SLOPES = wave(4, phase=0.7), wave(4, phase=5.0)


def ema_of(p, c):
    """A loss of the teacher's next state alone: no other block stands between."""
    return (c["slopes"] * ema({"w": c["past"]}, {"w": p["w"]}, momentum=0.9)["w"].sin()).sum() + p["w"].square().sum()


def ema_witness(is_open):
    def witness(parameters):
        w = parameters["w"].detach()
        return {"w": 2 * w + is_open * 0.1 * SLOPES * (0.9 * PAST + 0.1 * w).cos()}

    return witness


# --- data2vec -----------------------------------------------------------------------------------------------------

LAYERS = wave(3, 2, 4, phase=1.7)


def data2vec_witness(is_open):
    def witness(parameters):
        y, layers = held(parameters).values()
        centred = layers - layers.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        normal = centred / scale
        slope = ((y - normal.mean(0)) / 0.6).clamp(-1, 1) / y.numel()
        back = slope - slope.mean(-1, keepdim=True) - normal * (slope * normal).mean(-1, keepdim=True)
        return {"prediction": slope, "layers": -is_open * back / scale / len(layers)}

    return witness


# --- DINO ---------------------------------------------------------------------------------------------------------

STUDENT, TEACHER = wave(3, 2, 4, phase=0.3), wave(2, 2, 4, phase=2.9)
CENTER = wave(4, phase=4.4, size=0.2)
WARM = {"student_temperature": 0.5, "teacher_temperature": 0.3}


def dino_of(p, c):
    return dino_loss(p["student"], p["teacher"], c["center"], **WARM)


def dino_with_its_batch_of(p, c):
    return dino_loss(p["student"], p["teacher"], dino_center(c["center"], p["teacher"], momentum=0.8), **WARM)


def dino_gradients(student, teacher, center):
    """Return the gradients by the student's and by the centred teacher's outputs, pair by pair."""
    by_student, by_teacher = torch.zeros_like(student), torch.zeros_like(teacher)
    pairs = [(t, s) for t in range(len(teacher)) for s in range(len(student)) if t != s]
    for t, s in pairs:
        target, answer = softmax((teacher[t] - center) / 0.3), softmax(student[s] / 0.5)
        by_student[s] += (answer - target) / 0.5
        by_teacher[t] += entropy_gradient(target, answer.log()) / 0.3
    return by_student / len(pairs) / N, by_teacher / len(pairs) / N


def dino_witness(opens_target, opens_center=None):
    def witness(parameters):
        student, teacher = held(parameters).values()
        center = CENTER if opens_center is None else 0.8 * CENTER + 0.2 * teacher.flatten(0, 1).mean(0)
        by_student, by_teacher = dino_gradients(student, teacher, center)
        by_center = -0.2 * by_teacher.flatten(0, 1).mean(0).expand_as(teacher)
        return {"student": by_student, "teacher": opens_target * by_teacher + (opens_center or 0) * by_center}

    return witness


# --- MoCo ---------------------------------------------------------------------------------------------------------

QUERIES, KEYS, QUEUE = wave(2, 3, phase=0.9), wave(2, 3, phase=2.2), wave(5, 3, phase=3.3)


def moco_of(p, c):
    return moco_loss(p["q"], p["k"], c["queue"], temperature=0.7)


def moco_later_of(p, c):
    """The keys of an earlier batch are negatives of this one."""
    return moco_loss(p["q"], c["k"], enqueue(c["queue"], p["earlier"]), temperature=0.7)


def moco_witness(is_open):
    def witness(parameters):
        q, k = held(parameters).values()
        rows = torch.cat([k[:, None], QUEUE.expand(len(q), -1, -1)], 1)
        excess = softmax(torch.einsum("nd,nkd->nk", q, rows) / 0.7)
        excess[:, 0] -= 1
        excess = excess / 0.7 / len(q)
        return {"q": torch.einsum("nk,nkd->nd", excess, rows), "k": is_open * excess[:, :1] * q}

    return witness


def moco_later_witness(is_open):
    def witness(parameters):
        q, earlier = held(parameters).values()
        negatives = torch.cat([QUEUE[2:], earlier])
        rows = torch.cat([KEYS[:, None], negatives.expand(len(q), -1, -1)], 1)
        excess = softmax(torch.einsum("nd,nkd->nk", q, rows) / 0.7)
        excess[:, 0] -= 1
        excess = excess / 0.7 / len(q)
        return {"q": torch.einsum("nk,nkd->nd", excess, rows), "earlier": is_open * excess[:, -2:].T @ q}

    return witness


# --- SwAV ---------------------------------------------------------------------------------------------------------

SCORES = wave(3, 4, 3, phase=1.1, size=0.5)


def swav_of(p, c):
    return swav_loss(p["scores"], temperature=0.4, epsilon=0.3)


def codes_by_definition(scores, epsilon, iterations):
    """Return the codes as the definition has them, in the linear domain, with NumPy."""
    q = np.exp(scores.numpy() / epsilon)
    for _ in range(iterations):
        q = q / q.sum(0, keepdims=True)
        q = q / q.sum(1, keepdims=True)
    return torch.from_numpy(q)


def swav_witness(parameters):
    scores = parameters["scores"].detach()
    found = torch.zeros_like(scores)
    pairs = [(t, s) for t in range(2) for s in range(3) if t != s]
    for t, s in pairs:
        found[s] += (softmax(scores[s] / 0.4) - codes_by_definition(scores[t], 0.3, 3)) / 0.4
    return {"scores": found / len(pairs) / scores.shape[1]}


# --- labels -------------------------------------------------------------------------------------------------------

STRONG, WEAK = wave(3, 4, phase=0.2, size=1.5), wave(3, 4, phase=2.6, size=2.0)


def mean_teacher_witness(is_open):
    def witness(parameters):
        p, target = (softmax(x) for x in held(parameters).values())
        v = 2 * (p - target) / p.numel()
        pulled = [y * (v - (y * v).sum(-1, keepdim=True)) for y in (p, target)]
        return {"student": pulled[0], "teacher": -is_open * pulled[1]}

    return witness


def fixmatch_of(p, c):
    return fixmatch_loss(p["strong"], p["weak"], threshold=0.55)


def fixmatch_witness(parameters):
    strong, weak = held(parameters).values()
    found = torch.zeros_like(strong)
    for row, likely in enumerate(softmax(weak)):
        if likely.max() >= 0.55:
            found[row] = softmax(strong[row])
            found[row, likely.argmax()] -= 1
    return {"strong": found / 3, "weak": torch.zeros_like(weak)}


def soft_label_of(p, c):
    return soft_label_loss(p["strong"], p["weak"], temperature=0.7, threshold=0.55)


def soft_label_witness(is_open):
    def witness(parameters):
        strong, weak = held(parameters).values()
        counts = (softmax(weak).amax(-1, keepdim=True) >= 0.55).double() / 3
        target, p = softmax(weak / 0.7), softmax(strong)
        return {
            "strong": counts * (p - target),
            "weak": is_open * counts * entropy_gradient(target, p.log()) / 0.7,
        }

    return witness


def self_label_witness(is_open):
    """With its own answer as a label nothing moves; without the block the entropy falls."""

    def witness(parameters):
        logits = parameters["logits"].detach()
        p = softmax(logits)
        return {"logits": is_open * entropy_gradient(p, p.log()) / len(logits)}

    return witness


PEER_CASES = {
    "simsiam": (EMBEDDINGS, {}, lambda p, c: simsiam_loss(**p)),
    "byol": (
        {"prediction": EMBEDDINGS["p1"], "projection": EMBEDDINGS["z2"]},
        {},
        lambda p, c: byol_loss(p["prediction"], p["projection"]),
    ),
    "running_teacher": ({"w": wave(4, phase=1.3)}, {"past": PAST, "slopes": SLOPES}, ema_of),
    "data2vec": (
        {"prediction": wave(2, 4, phase=0.4), "layers": LAYERS},
        {},
        lambda p, c: data2vec_loss(p["prediction"], p["layers"], beta=0.6),
    ),
    "dino": ({"student": STUDENT, "teacher": TEACHER}, {"center": CENTER}, dino_of),
    "dino_with_its_batch": ({"student": STUDENT, "teacher": TEACHER}, {"center": CENTER}, dino_with_its_batch_of),
    "moco": ({"q": QUERIES, "k": KEYS}, {"queue": QUEUE}, moco_of),
    "moco_later": ({"q": QUERIES, "earlier": wave(2, 3, phase=1.9)}, {"queue": QUEUE, "k": KEYS}, moco_later_of),
    "swav": ({"scores": SCORES}, {}, swav_of),
    "mean_teacher": (
        {"student": STRONG, "teacher": WEAK},
        {},
        lambda p, c: mean_teacher_loss(p["student"], p["teacher"]),
    ),
    "fixmatch": ({"strong": STRONG, "weak": WEAK}, {}, fixmatch_of),
    "soft_label": ({"strong": STRONG, "weak": WEAK}, {}, soft_label_of),
}


def case(program, block, blocked, opened=None):
    parameters, constants, loss = PEER_CASES[program]
    return BlockCase(
        id=program,
        block=block,
        parameters=leaves(**parameters),
        loss=lambda p: loss(p, constants),
        blocked=blocked,
        opened=opened,
    )


BLOCK_CASES = [
    case("simsiam", SIMSIAM_TARGET, simsiam_witness(0), simsiam_witness(1)),
    case("byol", BYOL_TARGET, byol_witness(0), byol_witness(1)),
    case("running_teacher", EMA_STUDENT, ema_witness(0), ema_witness(1)),
    case("data2vec", DATA2VEC_TARGET, data2vec_witness(0), data2vec_witness(1)),
    case("dino", DINO_TARGET, dino_witness(0), dino_witness(1)),
    case("dino_with_its_batch", DINO_CENTER, dino_witness(0, 0), dino_witness(0, 1)),
    case("moco", MOCO_KEY, moco_witness(0), moco_witness(1)),
    case("moco_later", MOCO_QUEUE, moco_later_witness(0), moco_later_witness(1)),
    case("swav", SWAV_CODES, swav_witness),
    case("mean_teacher", MEAN_TEACHER_TARGET, mean_teacher_witness(0), mean_teacher_witness(1)),
    case("fixmatch", HARD_LABEL, fixmatch_witness, fixmatch_witness),
    case("soft_label", SOFT_LABEL, soft_label_witness(0), soft_label_witness(1)),
    BlockCase(
        id="self_label",
        block=SOFT_LABEL,
        parameters=leaves(logits=WEAK),
        loss=lambda p: soft_label_loss(p["logits"], p["logits"]),
        blocked=self_label_witness(0),
        opened=self_label_witness(1),
        tolerance=1e-15,
    ),
]

# --- numbers of one written example each, found by another program -------------------------------------------------

T3, S3 = tensor([[0.9, 0.1, -0.4]]), tensor([[0.5, -0.2, 1.3]])
SWAV_EXAMPLE = tensor(
    [
        [[0.9, 0.1, -0.3], [0.2, 0.7, 0.4], [-0.5, 0.6, 0.8], [0.3, 0.2, 0.1]],
        [[0.8, 0.3, -0.2], [0.1, 0.9, 0.2], [-0.2, 0.4, 0.9], [0.5, 0.1, 0.0]],
    ]
)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def byol_example(p):
    matrix = tensor([[1, 0.5, 0], [0, 1, -0.5], [0.3, 0, 1]])
    target = ema({"w": tensor([0.2, 0.4, 0.9])}, {"w": p["theta"]}, momentum=0.99)["w"]
    return byol_loss(matrix @ (p["theta"] * tensor([1, 2, -0.5])), matrix @ (target * tensor([0.8, 2.2, -0.1])))


def dino_example(p):
    """The centre is that after the batch; the second view is the student's, the same for both samples."""
    student = torch.stack([torch.zeros(2, 3).double(), p["s"].expand(2, -1)])
    center = dino_center(tensor([0.1, 0, -0.1]), p["t"][None], momentum=0.9)
    return dino_loss(student, p["t"][None], center)


# Name -> (parameters, loss, blocks to be opened, value, gradients: name -> (index, closed, open)).
NUMBERS = {
    "SimSiam": (
        {
            "p1": tensor([1, 2, -0.5]),
            "z1": tensor([0.3, -1, 0.8]),
            "p2": tensor([0.2, 0.9, 0.4]),
            "z2": tensor([1.5, 0.5, -1]),
        },
        lambda p: simsiam_loss(**p),
        [SIMSIAM_TARGET],
        -0.1532337867,
        {
            "p1": ((), *2 * [[-0.1083107709, 0.07498437988, 0.08331597765]]),
            "p2": ((), *2 * [[-0.1524260872, 0.2029851087, -0.3805034511]]),
            "z1": ((), [0.0, 0.0, 0.0], [-0.1097599448, -0.2267351847, -0.2422590016]),
            "z2": ((), [0.0, 0.0, 0.0], [0.03332639106, -0.1832951508, -0.04165798882]),
        },
    ),
    "BYOL": (
        {"theta": tensor([0.7, -0.3, 1.1])},
        byol_example,
        [BYOL_TARGET, EMA_STUDENT],
        2.128535627,
        {
            "theta": (
                (),
                [-1.838388061, -7.104538201, -0.767718016],
                [-1.845989404, -7.099237312, -0.7683000273],
            )
        },
    ),
    "DINO": (
        {"s": tensor([0.5, -0.2, 1.3]), "t": tensor([[0.9, 0.1, -0.4], [0.2, 0.8, 0.6]])},
        dino_example,
        [DINO_TARGET],
        10.50310394,
        {
            "s": ((), *2 * [[-4.996646483, -4.335175772, 9.331822255]]),
            "t": ((1,), [0.0, 0.0, 0.0], [-1.362210408e-06, 21.61589153, -21.61589017]),
        },
    ),
    "DINO with its centre": (
        {"s": tensor([0.5, -0.2, 1.3]), "t": tensor([[0.9, 0.1, -0.4], [0.2, 0.8, 0.6]])},
        dino_example,
        [DINO_TARGET, DINO_CENTER],
        10.50310394,
        {"t": ((1,), [0.0, 0.0, 0.0], [-1.18425433e-06, 20.53509684, -20.53509566])},
    ),
    "MoCo": (
        {
            "q": unit(tensor([[1, 2, -0.5]])),
            "k": unit(tensor([[0.9, 1.5, 0.2]])),
        },
        lambda p: moco_loss(p["q"], p["k"], unit(tensor([[-1, 0.3, 0.4], [0.2, -0.8, 1]])), temperature=0.2),
        [MOCO_KEY],
        0.00315522739,
        {
            "q": ((0,), *2 * [[-0.02021838361, -0.01081517211, 0.004604192216]]),
            "k": ((0,), [0.0, 0.0, 0.0], [-0.006874419761, -0.01374883952, 0.00343720988]),
        },
    ),
    "SwAV": (
        {"scores": SWAV_EXAMPLE},
        lambda p: swav_loss(p["scores"]),
        [SWAV_CODES],
        0.4700145794,
        {
            "scores": (
                (0, [0, 3]),
                [
                    [-0.0003960765734, 0.0003884003288, 7.676244571e-06],
                    [-0.418190586, 0.3056831599, 0.1125074261],
                ],
                [[1.320006686, 0.0003872725965, 7.685846497e-06], [-1.738650242, 1.317111373, 0.4214985836]],
            )
        },
    ),
    "mean teacher": (
        {"student": S3, "teacher": T3},
        lambda p: mean_teacher_loss(p["student"], p["teacher"]),
        [MEAN_TEACHER_TARGET],
        0.1023208329,
        {
            "student": ((0,), *2 * [[-0.08491738118, -0.02575320294, 0.1106705841]]),
            "teacher": ((0,), [0.0, 0.0, 0.0], [0.06471577092, -0.003029701373, -0.06168606955]),
        },
    ),
    "FixMatch": (
        {"strong": S3, "weak": T3},
        lambda p: fixmatch_loss(p["strong"], p["weak"], threshold=0.4),
        [HARD_LABEL],
        1.314295073,
        {
            "strong": ((0,), *2 * [[-0.7313363552, 0.1334144177, 0.5979219375]]),
            "weak": ((0,), *2 * [[0.0, 0.0, 0.0]]),
        },
    ),
    "sharpened": (
        {"strong": S3, "weak": T3},
        lambda p: soft_label_loss(p["strong"], p["weak"], temperature=0.5),
        [SOFT_LABEL],
        1.378478288,
        {
            "strong": ((0,), *2 * [[-0.5149309583, -0.02479060421, 0.5397215625]]),
            "weak": ((0,), [0.0, 0.0, 0.0], [-0.1005872422, 0.2011788167, -0.1005915745]),
        },
    ),
    "one's own sharpened label": (
        {"logits": S3},
        lambda p: soft_label_loss(p["logits"], p["logits"], temperature=0.5),
        [SOFT_LABEL],
        None,
        {
            "logits": (
                (0,),
                [0.1073636803, 0.09363833616, -0.2010020165],
                [0.3045676962, 0.1979547619, -0.5025224581],
            )
        },
    ),
    "one's own label": (
        {"logits": S3},
        lambda p: soft_label_loss(p["logits"], p["logits"]),
        [SOFT_LABEL],
        None,
        {"logits": ((0,), [0.0, 0.0, 0.0], [0.103421387, 0.1447476333, -0.2481690203])},
    ),
    "data2vec": (
        {
            "prediction": tensor([0.2, -0.3, 1.5, 0.4]),
            "layers": tensor([[0.5, -1, 2, 0.1], [1, 0.3, -0.4, 0.8]]),
        },
        lambda p: data2vec_loss(p["prediction"], p["layers"], beta=1.0),
        [DATA2VEC_TARGET],
        0.3046033995,
        {
            "prediction": ((), *2 * [[-0.09466785714, 0.1167550873, 0.25, 0.04812984062]]),
            "layers": (
                (0,),
                [0.0, 0.0, 0.0, 0.0],
                [0.08342900279, -0.04705240958, -0.04480532009, 0.008428726881],
            ),
        },
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_an_example(name):
    parameters, loss, blocks, value, gradients = NUMBERS[name]
    parameters = leaves(**parameters)()

    def found():
        total = loss(parameters)
        slopes = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return total, dict(zip(parameters, slopes, strict=True))

    total, closed = found()
    with unblock(*blocks):
        _, opened = found()
    if value is not None:
        torch.testing.assert_close(total.item(), value, rtol=2e-9, atol=0)
    for parameter, (index, *expected) in gradients.items():
        for slopes, numbers in zip((closed, opened), expected, strict=True):
            torch.testing.assert_close(slopes[parameter][index], tensor(numbers), rtol=2e-9, atol=1e-15)


# --- properties ---------------------------------------------------------------------------------------------------


def test_the_leak_of_a_cosine_is_orthogonal_to_the_target():
    parameters = leaves(**EMBEDDINGS)()
    with unblock(SIMSIAM_TARGET):
        leak = torch.autograd.grad(simsiam_loss(**parameters), parameters["z2"])[0]
    assert (leak * parameters["z2"]).sum(-1).abs().max() < 1e-15


def test_byol_is_the_squared_distance_of_unit_vectors():
    q, z = EMBEDDINGS["p1"], EMBEDDINGS["z2"]
    torch.testing.assert_close(byol_loss(q, z), (unit(q) - unit(z)).square().sum(-1).mean())


def test_without_the_block_hard_labels_are_redundant_and_soft_ones_are_not():
    parameters = leaves(weight=wave(4, 3, phase=0.6))()
    weak, strong = wave(6, 4, phase=1.5), wave(6, 4, phase=1.6)

    def verdict(loss):
        return compare(lambda: loss(strong @ parameters["weight"], weak @ parameters["weight"]), parameters)

    assert [effect.verdict.kind for effect in verdict(fixmatch_loss).effects] == ["redundant"]
    (effect,) = verdict(lambda strong, weak: fixmatch_loss(strong, weak, threshold=0)).effects
    assert effect.leak == 0
    assert [effect.verdict.kind for effect in verdict(soft_label_loss).effects] == ["partial"]


def siamese(w):
    """SimSiam with a linear encoder and a linear predictor on two views of three points."""
    encoder, predictor = w[:4].reshape(2, 2), w[4:].reshape(2, 2)
    x1, x2 = wave(3, 2, phase=0.8), wave(3, 2, phase=0.8) + 0.3 * wave(3, 2, phase=2.1)
    z1, z2 = x1 @ encoder, x2 @ encoder
    return simsiam_loss(z1 @ predictor, z2 @ predictor, z1, z2)


def test_simsiam_is_the_gradient_of_no_function():
    point = tensor([0.8, -0.3, 0.2, 0.9, 1.1, 0.4, -0.2, 0.7]).requires_grad_()
    field = field_jacobian(lambda: siamese(point), point)
    step, columns = 1e-5, []
    for i in range(8):
        ends = []
        for sign in (-1, 1):
            moved = (point.detach() + sign * step * torch.eye(8).double()[i]).requires_grad_()
            ends.append(torch.autograd.grad(siamese(moved), moved)[0])
        columns.append((ends[1] - ends[0]) / (2 * step))
    jacobian = torch.stack(columns, 1)
    torch.testing.assert_close(field.jacobian, jacobian, rtol=0, atol=1e-8)
    assert not field.is_gradient_field
    assert field.asymmetry == pytest.approx(((jacobian - jacobian.T).norm() / jacobian.norm()).item(), abs=1e-6)
    assert field.asymmetry > 0.2


def test_hard_labels_leave_a_gradient_field_and_soft_ones_do_not():
    weight = wave(4, 3, phase=0.6).requires_grad_()
    weak, strong = wave(6, 4, phase=1.5), wave(6, 4, phase=1.6)
    hard = field_jacobian(lambda: fixmatch_loss(strong @ weight, weak @ weight, threshold=0.5), weight)
    soft = field_jacobian(lambda: soft_label_loss(strong @ weight, weak @ weight), weight)
    assert (hard.is_gradient_field, soft.is_gradient_field) == (True, False)


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_codes_are_those_of_the_definition(iterations):
    found = sinkhorn(SCORES[0], epsilon=0.2, iterations=iterations)
    torch.testing.assert_close(found, codes_by_definition(SCORES[0], 0.2, iterations), rtol=1e-13, atol=0)


def test_codes_are_balanced_at_convergence_and_not_after_three_turns():
    columns = sinkhorn(SWAV_EXAMPLE[0], iterations=3).mean(0)
    assert columns.tolist() != pytest.approx([1 / 3] * 3, abs=0.05)
    torch.testing.assert_close(sinkhorn(SWAV_EXAMPLE[0], iterations=2000).mean(0), torch.full((3,), 1 / 3).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_far_apart_have_codes(dtype):
    """In the linear domain the first overflows in float32, and a row of -200 makes all codes NaN."""
    scores = torch.tensor([[50.0, 1.0, -3.0], [-200.0, -201.0, -200.0], [0.0, 90.0, 0.0], [3.0, 2.0, 2.5]], dtype=dtype)
    codes = sinkhorn(scores, iterations=50)
    assert codes.dtype == torch.float32
    torch.testing.assert_close(codes.sum(-1), torch.ones(4))
    torch.testing.assert_close(codes[0], torch.tensor([1.0, 0, 0]))


def codes_in_the_log_domain(scores, epsilon, iterations):
    log_codes = scores.double() / epsilon
    for _ in range(iterations):
        log_codes = log_codes - log_codes.logsumexp(0, keepdim=True)
        log_codes = log_codes - log_codes.logsumexp(1, keepdim=True)
    return log_codes.exp()


@pytest.mark.parametrize("iterations", [1, 3, 4, 100])
@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_codes_without_a_balanced_solution_are_those_of_the_log_domain(size, iterations):
    """All rows but one ask for the first prototype: the factors of rows and columns grow without end."""
    scores = torch.zeros(40, 5)
    scores[:-1, 0], scores[-1, 1:] = size, size
    scores = scores + wave(40, 5, phase=0.5).float()
    found = sinkhorn(scores, iterations=iterations)
    expected = codes_in_the_log_domain(scores, 0.05, iterations).float()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


def test_autocast_does_not_round_the_products():
    for program in ("swav", "dino", "moco"):
        parameters, constants, loss = PEER_CASES[program]
        wide = [{name: value.float() for name, value in given.items()} for given in (parameters, constants)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss(*wide)
        assert torch.equal(found, loss(*wide))


def test_a_queue_of_one_key_and_a_query_that_finds_its_key():
    q = tensor([[40.0, 0.0]])
    loss = moco_loss(q, tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]]), temperature=1.0)
    torch.testing.assert_close(loss.item(), math.log1p(math.exp(-40)), rtol=1e-12, atol=0)


def test_the_views_that_the_teacher_does_not_see_are_students_only():
    """Each pair of different views counts once; a view never predicts itself."""
    local = STUDENT.clone()
    expected = []
    for t in range(2):
        for s in range(3):
            if s != t:
                target = softmax((TEACHER[t] - CENTER) / 0.04)
                expected.append(-(target * softmax(local[s] / 0.1).log()).sum(-1).mean())
    torch.testing.assert_close(dino_loss(local, TEACHER, CENTER), torch.stack(expected).mean())


@pytest.mark.parametrize("views", [2, 4])
def test_swav_counts_each_pair_of_different_views_once(views):
    scores = torch.cat([SCORES, SCORES[:1] + 0.1])[:views]
    codes = [codes_by_definition(scores[t], 0.05, 3) for t in range(2)]
    expected = [
        -(codes[t] * softmax(scores[s] / 0.1).log()).sum(-1).mean() for t in range(2) for s in range(views) if t != s
    ]
    torch.testing.assert_close(swav_loss(scores), torch.stack(expected).mean())


def test_a_collapse_to_uniform_has_the_logarithm_of_the_outputs():
    """The value at which users report that DINO is stuck. One product over all samples has 1e-5 of rounding here."""
    flat = torch.zeros(2, 30, 4096)
    assert dino_loss(flat, flat, torch.zeros(4096)).item() == pytest.approx(math.log(4096), rel=2e-6)


# --- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [negative_cosine_similarity, byol_loss], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_vector_without_a_direction_has_similarity_zero_and_no_gradient(loss, dtype):
    p = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=dtype, requires_grad=True)
    z = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    with unblock(SIMSIAM_TARGET if loss is negative_cosine_similarity else BYOL_TARGET):
        value = loss(p, z)
        value.backward()
    assert value.item() == (0 if loss is negative_cosine_similarity else 2)
    assert p.grad.abs().max() == z.grad.abs().max() == 0


@pytest.mark.parametrize("sizes", [(1e-30, 1e-30), (1e30, 1e30), (1e-30, 1e30), (1e20, 1.0)], ids=str)
@pytest.mark.parametrize("loss", [negative_cosine_similarity, byol_loss], ids=lambda loss: loss.__name__)
def test_a_cosine_does_not_depend_on_the_sizes_of_its_vectors(loss, sizes):
    """A closed form of the gradient, whose size is that of 1 / |p|; squares of these entries are no float32."""
    p, z = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.5]])
    tiny, huge = (p * sizes[0]).requires_grad_(), z * sizes[1]
    value = loss(tiny, huge)
    (found,) = torch.autograd.grad(value, tiny)
    torch.testing.assert_close(value, loss(p, z))
    p, z = p / 5, z / z.norm()
    scale = 1 if loss is negative_cosine_similarity else 2
    torch.testing.assert_close(found * sizes[0], -scale * (z - (p * z).sum() * p) / 5)


def test_saturated_logits_have_finite_gradients():
    far = torch.tensor([[400.0, 0.0, -400.0], [0.0, 300.0, 0.0]], requires_grad=True)
    for loss in (fixmatch_loss, soft_label_loss, mean_teacher_loss):
        other = far.detach().flip(0).requires_grad_()
        value = loss(far, other)
        (found,) = torch.autograd.grad(value, far)
        assert value.isfinite()
        assert found.isfinite().all()
    views = torch.stack([far, far.flip(0)])
    assert dino_loss(views, views, torch.zeros(3)).isfinite()


def test_no_confident_sample_gives_zero_and_no_gradient():
    strong = torch.zeros(2, 3, requires_grad=True)
    loss = fixmatch_loss(strong, torch.zeros(2, 3), threshold=0.5)
    loss.backward()
    assert loss == 0
    assert strong.grad.abs().max() == 0


@pytest.mark.parametrize("loss", [fixmatch_loss, lambda s, w: soft_label_loss(s, w, threshold=0.9)])
def test_missing_answers_are_not_samples_below_the_threshold(loss):
    weak = torch.tensor([[9.0, 0.0], [torch.nan, 0.0]])
    assert loss(torch.zeros(2, 2), weak).isnan()
    assert loss(torch.zeros(1, 2), weak[:1]).isfinite()


def test_a_sample_at_the_threshold_counts():
    assert fixmatch_loss(torch.zeros(1, 2), torch.zeros(1, 2), threshold=0.5) > 0
    assert soft_label_loss(torch.zeros(1, 2), torch.zeros(1, 2), threshold=0.5) > 0


def test_absolute_errors_for_beta_zero():
    layers = [LAYERS[0], LAYERS[1]]
    target = torch.stack([(h - h.mean(-1, keepdim=True)) / h.std(-1, correction=0, keepdim=True) for h in layers])
    found = data2vec_loss(torch.zeros_like(layers[0]), layers, beta=0)
    torch.testing.assert_close(found, target.mean(0).abs().mean(), rtol=1e-4, atol=0)


def test_one_sample_and_more_dimensions():
    one = simsiam_loss(*[value[0] for value in EMBEDDINGS.values()])
    other = simsiam_loss(*[value[1] for value in EMBEDDINGS.values()])
    more = simsiam_loss(*[value.reshape(2, 1, 3) for value in EMBEDDINGS.values()])
    torch.testing.assert_close((one + other) / 2, more)
    flat = dino_loss(STUDENT, TEACHER, CENTER)
    torch.testing.assert_close(dino_loss(STUDENT[:, None], TEACHER[:, None], CENTER), flat)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("program", [name for name in PEER_CASES if name != "running_teacher"])
def test_half_precision_is_computed_in_float32(program, dtype):
    parameters, constants, loss = PEER_CASES[program]
    half = {name: value.to(dtype).requires_grad_() for name, value in parameters.items()}
    wide = {name: value.detach().float() for name, value in half.items()}
    constants = {name: value.float() for name, value in constants.items()}
    found = loss(half, constants)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss(wide, constants), rtol=1e-6, atol=0)
    first = next(iter(half.values()))
    (slope,) = torch.autograd.grad(found, first)
    assert slope.dtype == dtype


@pytest.mark.parametrize("program", PEER_CASES)
def test_a_batch_of_losses_is_the_losses(program):
    parameters, constants, loss = PEER_CASES[program]
    stacked = {name: torch.stack([value, value.flip(-1)]) for name, value in parameters.items()}
    found = torch.vmap(lambda p: loss(p, constants))(stacked)
    expected = [loss({name: value[i] for name, value in stacked.items()}, constants) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("program", PEER_CASES)
def test_a_compiled_loss_is_the_loss(program):
    torch._dynamo.reset()
    parameters, constants, loss = PEER_CASES[program]
    p = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    compiled = torch.compile(lambda: loss(p, constants), backend="aot_eager", fullgraph=True)
    for names in ([], [case.block for case in BLOCK_CASES if case.id == program]):
        with unblock(*names):
            value, expected = compiled(), loss(p, constants)
            torch.testing.assert_close(value, expected)
            found, wanted = (
                torch.autograd.grad(v, list(p.values()), materialize_grads=True) for v in (value, expected)
            )
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("program", PEER_CASES)
def test_losses_on_a_gpu(program):
    parameters, constants, loss = PEER_CASES[program]
    answers = []
    for device in ("cpu", ACCELERATOR):
        p = {name: value.to(device).requires_grad_() for name, value in parameters.items()}
        value = loss(p, {name: constant.to(device) for name, constant in constants.items()})
        slopes = torch.autograd.grad(value, list(p.values()), allow_unused=True, materialize_grads=True)
        answers.append([value.detach().cpu(), *[slope.cpu() for slope in slopes]])
    torch.testing.assert_close(*answers)


REFUSED = [
    (lambda: simsiam_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1)), "`p1` should have"),
    (lambda: simsiam_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), torch.ones(2, 3)), "`p2` should have"),
    (lambda: negative_cosine_similarity(torch.ones(2, 3), torch.ones(3)), "`p` should have the shape of `z`"),
    (lambda: fixmatch_loss(torch.ones(2, 3), torch.ones(2, 3).long()), "`weak` should be a floating-point tensor"),
    (lambda: soft_label_loss(torch.ones(2, 3).long(), torch.ones(2, 3)), "`strong` should be a floating-point tensor"),
    (lambda: mean_teacher_loss(torch.ones(3), torch.ones(3).long()), "`teacher_logits` should be a floating-point"),
    (lambda: byol_loss(torch.ones(2, 3), torch.ones(3)), "`prediction` should have the shape of `projection`"),
    (lambda: byol_loss(torch.tensor(1.0), torch.tensor(1.0)), "with 1 or more dimensions"),
    (lambda: data2vec_loss(torch.ones(3), []), "`layers` should be one layer or more"),
    (lambda: data2vec_loss(torch.ones(3), [torch.ones(3), torch.ones(1, 3)]), "`layers` should have the shape"),
    (lambda: data2vec_loss(torch.ones(3), [torch.ones(3)], beta=-1), "`beta` should be finite and not negative"),
    (lambda: moco_loss(torch.ones(2, 3), torch.ones(1, 3), torch.ones(4, 3)), "`k` should have the shape of `q`"),
    (lambda: moco_loss(torch.ones(3), torch.ones(3), torch.ones(4, 3)), "with 2 or more dimensions"),
    (lambda: moco_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(0, 3)), r"`queue` should have shape \(keys, 3\)"),
    (lambda: moco_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(4, 1)), "`queue` should have"),
    (lambda: enqueue(torch.ones(4, 2), torch.ones(2, 3)), "`queue` should have"),
    (lambda: enqueue(torch.ones(4, 2), torch.ones(2)), r"`keys` should have shape \(samples, features\). Found \(2,\)"),
    (lambda: dino_loss(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(3)), "`student` should have at least two"),
    (lambda: dino_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), r"\(views, samples, outputs\)"),
    (lambda: dino_loss(torch.ones(2, 2, 3), torch.ones(3, 2, 3), torch.ones(3)), "`teacher` should have from 1 to 2"),
    (lambda: dino_loss(torch.ones(2, 2, 3), torch.ones(2, 1, 3), torch.ones(3)), "`teacher` should have shape"),
    (lambda: dino_loss(torch.ones(2, 2, 3), torch.ones(2, 2, 3), torch.ones(2)), "`center` should have shape"),
    (lambda: dino_center(torch.ones(1), torch.ones(2, 3)), "`center` should have shape"),
    (lambda: dino_center(torch.ones(3), torch.ones(2, 3), momentum=1.5), "`momentum` should be from 0 to 1"),
    (lambda: sinkhorn(torch.ones(3)), "`scores` should have shape"),
    (lambda: sinkhorn(torch.ones(2, 3), epsilon=0), "`epsilon` should be positive"),
    (lambda: swav_loss(torch.ones(1, 2, 3)), "`scores` should have at least two views"),
    (lambda: swav_loss(torch.ones(2, 2, 2, 3)), "`scores` should have shape"),
    (lambda: swav_loss(torch.ones(2, 2, 3), n_assigned=3), "`n_assigned` should be an integer from 1 to 2"),
    (lambda: mean_teacher_loss(torch.ones(2, 3), torch.ones(3)), "`teacher_logits` should have the shape"),
    (lambda: fixmatch_loss(torch.ones(2, 3), torch.ones(3)), "`weak` should have the shape of `strong`"),
    (lambda: fixmatch_loss(torch.ones(3), torch.ones(3), threshold=2), "`threshold` should be from 0 to 1"),
    (lambda: soft_label_loss(torch.ones(2, 3), torch.ones(2, 1)), "`weak` should have the shape of `strong`"),
    (lambda: soft_label_loss(torch.ones(3), torch.ones(3), temperature=0), "`temperature` should be positive"),
    (lambda: ema({"a": torch.ones(2)}, {"b": torch.ones(2)}, momentum=0.9), "Found a difference in a, b"),
    (lambda: ema({"a": torch.ones(2)}, {"a": torch.ones(1)}, momentum=0.9), "should have the shapes of `teacher`"),
    (lambda: ema({"a": torch.ones(2)}, {"a": torch.ones(2)}, momentum=1.1), "`momentum` should be from 0 to 1"),
    (
        lambda: ema({"a": torch.ones(2).half()}, {"a": torch.ones(2)}, momentum=0.9),
        "`teacher` should be float32 or float64",
    ),
]


@each(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
