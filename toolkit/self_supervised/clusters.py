r"""Losses that predict the soft cluster of one view from another view: DINO with its centre, SwAV with Sinkhorn codes.

V views, T of them seen by the teacher (the first T), N samples, K outputs or prototypes, sg stops the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit._checks import integer, number
from toolkit._tensors import exact_products, floating, wide
from toolkit.blocks import block, stop_gradient
from toolkit.self_supervised._tensors import cross_view_entropy, views

__all__ = [
    "DINO_CENTER",
    "DINO_TARGET",
    "SWAV_CODES",
    "DINOLoss",
    "dino_center",
    "dino_loss",
    "sinkhorn",
    "swav_loss",
]

# Turns after which the factors of rows and columns are multiplied into the codes. Without a balanced solution they grow
# by a factor of up to NK in each turn.
_TURNS = 3

DINO_TARGET = block(
    "self_supervised.dino_target",
    "The teacher's sharpened distribution is a label: only the student's distribution moves towards it.",
)
DINO_CENTER = block(
    "self_supervised.dino_center",
    "The centre is a statistic of past teacher outputs: it is subtracted like a bias that nobody trains.",
)
SWAV_CODES = block(
    "self_supervised.swav_codes",
    "The codes solve a problem of balanced assignment: they are labels, which the scores should predict, not change.",
)


def dino_loss(
    student: Tensor,
    teacher: Tensor,
    center: Tensor,
    *,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.04,
) -> Tensor:
    r"""Return DINO's loss, the mean cross entropy over samples and pairs of different views t, s.

    .. math:: L_{ts} = -\sum_k P_{tk} \log P_{sk}, \quad
        P_t = \operatorname{softmax}((\operatorname{sg}(x_t) - c) / \tau_t), \quad
        P_s = \operatorname{softmax}(x_s / \tau_s)

    The gradient with respect to :math:`x_s` is the mean over t of :math:`(P_s - P_t) / \tau_s`, and that with respect
    to :math:`x_t` is 0. With `DINO_TARGET` open, the latter is the mean over s of :math:`-P_t \odot (\log P_s
    - E_{P_t} \log P_s) / \tau_t`.

    The centre is the argument `center`, a constant or with a gradient: the centre of earlier batches, as in `DINOLoss`
    and the code of the paper's authors, or the centre after this batch, from `dino_center`.

    Args:
        student: Outputs x of all V views, (V, \*, K).
        teacher: Outputs x of the first T views, 1 <= T <= V, (T, \*, K).
        center: c, (K,).
        student_temperature: :math:`\tau_s`.
        teacher_temperature: :math:`\tau_t`, smaller: it sharpens the target.

    Returns:
        A scalar, in nats per sample and pair; half precision is computed in float32.

    Raises:
        ValueError: If a temperature is not positive, or shapes do not fit.

    References:
        Caron, Touvron, Misra, Jégou, Mairal, Bojanowski and Joulin, "Emerging properties in self-supervised vision
        transformers", 2021, equation 3 and algorithm 1.

    Example:
        >>> x = torch.tensor([[[0.1, 0.0]], [[0.2, 0.0]]])
        >>> dino_loss(x, x, torch.tensor([0.1, 0.0]))
        tensor(0.7580)
    """
    student_temperature = number("student_temperature", student_temperature, above=0)
    teacher_temperature = number("teacher_temperature", teacher_temperature, above=0)
    views("student", student)
    views("teacher", teacher, student.shape[1:], len(student))
    _check_center(center, student)
    target = wide(stop_gradient(teacher, DINO_TARGET))
    return cross_view_entropy(
        ((target - center.to(target)) / teacher_temperature).softmax(-1),
        (wide(student) / student_temperature).log_softmax(-1),
    )


def dino_center(center: Tensor, teacher: Tensor, *, momentum: float = 0.9) -> Tensor:
    r"""Return the next centre, :math:`m c + (1 - m) \operatorname{mean} \operatorname{sg}(x_t)`.

    With `DINO_CENTER` open and a gradient g by the result, each of the B averaged outputs gets :math:`(1 - m) g / B`.

    Args:
        center: c, (K,).
        teacher: The teacher's outputs x, (T, \*, K); the mean is over all but the last dimension.
        momentum: m, from 0 to 1.

    Returns:
        (K,), in the precision of `center`.

    Raises:
        ValueError: If `momentum` is out of its range, the shapes do not fit, or there are no outputs.

    References:
        As `dino_loss`, equation 4.

    Example:
        >>> dino_center(torch.tensor([1.0, 0.0]), torch.tensor([[3.0, 0.0], [1.0, 4.0]]), momentum=0.5)
        tensor([1.5000, 1.0000])
    """
    momentum = number("momentum", momentum, least=0, most=1)
    _check_center(center, teacher)
    if teacher.numel() == 0:
        raise ValueError(f"`teacher` should have outputs to average. Found shape {tuple(teacher.shape)}.")
    batch = wide(stop_gradient(teacher, DINO_CENTER)).flatten(0, -2).mean(0)
    return momentum * center + (1 - momentum) * batch.to(center)


class DINOLoss(nn.Module):
    """DINO's loss with its centre, which is updated after each call in training mode and constant in evaluation mode.

    In distributed training each process has its own centre.

    Args:
        output_dim: Number of outputs, K.
        student_temperature: As in `dino_loss`.
        teacher_temperature: As in `dino_loss`; the attribute may be changed by a schedule.
        center_momentum: m of `dino_center`.

    Attributes:
        center: (K,), of earlier batches; zeros at first.

    Raises:
        ValueError: If a number is out of its range.

    References:
        As `dino_loss`.

    Example:
        >>> x = torch.tensor([[[0.1, 0.0]], [[0.2, 0.0]]])
        >>> loss = DINOLoss(2)
        >>> loss(x, x), loss.center
        (tensor(0.2993), tensor([0.0150, 0.0000]))
    """

    center: Tensor

    def __init__(
        self,
        output_dim: int,
        *,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        center_momentum: float = 0.9,
    ) -> None:
        super().__init__()
        self.student_temperature = number("student_temperature", student_temperature, above=0)
        self.teacher_temperature = number("teacher_temperature", teacher_temperature, above=0)
        self.center_momentum = number("center_momentum", center_momentum, least=0, most=1)
        self.register_buffer("center", torch.zeros(integer("output_dim", output_dim)))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        r"""Return `dino_loss` with the centre of earlier batches.

        Args:
            student: (V, \*, K).
            teacher: (T, \*, K).

        Raises:
            ValueError: As in `dino_loss`.
        """
        loss = dino_loss(
            student,
            teacher,
            self.center,
            student_temperature=self.student_temperature,
            teacher_temperature=self.teacher_temperature,
        )
        if self.training:
            self.center = dino_center(self.center, teacher, momentum=self.center_momentum)
        return loss


def sinkhorn(scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    r"""Return SwAV's codes: :math:`e^{S / \epsilon}`, its columns and rows scaled in turn, rows last.

    The columns are scaled to equal sums and the rows to 1, so that at convergence each prototype gets N / K samples.
    Each column and then each row is divided by its largest entry in the log domain, so that no score overflows, and no
    row vanishes even if all scores of a sample are very low.

    Args:
        scores: S, (\*, N, K).
        epsilon: Positive; a smaller value is closer to a hard assignment.
        iterations: Number of turns.

    Returns:
        Rows of sum 1, (\*, N, K); half precision is computed in float32.

    Raises:
        ValueError: If `epsilon` is not positive, `iterations` is not a positive integer, or `scores` has fewer
            than two dimensions, no samples or no prototypes.

    References:
        Caron, Misra, Mairal, Goyal, Bojanowski and Joulin, "Unsupervised learning of visual features by contrasting
        cluster assignments", 2020, equation 5; Cuturi, "Sinkhorn distances: lightspeed computation of optimal
        transport", 2013.

    Example:
        >>> sinkhorn(torch.tensor([[0.10, 0.0], [0.12, 0.0]]), iterations=100)
        tensor([[0.4502, 0.5498],
                [0.5498, 0.4502]])
    """
    epsilon = number("epsilon", epsilon, above=0)
    iterations = integer("iterations", iterations)
    floating(scores=scores)
    if scores.ndim < 2 or 0 in scores.shape[-2:]:
        raise ValueError(f"`scores` should have shape (samples, prototypes), not empty. Found {tuple(scores.shape)}.")
    scores = wide(scores)
    scaled = torch.add(-scores.amax(-2, keepdim=True) / epsilon, scores, alpha=1 / epsilon)
    heights = scaled.amax(-1, keepdim=True)
    codes, rows = _exponential(scaled, heights), heights.exp()
    with exact_products(codes.device):
        for turn in range(1, iterations + 1):
            columns = (rows.mT @ codes).reciprocal()
            rows = (codes @ columns.mT).reciprocal()
            if turn % _TURNS == 0 or turn == iterations:
                codes, rows = _product(codes, rows, columns), torch.ones_like(rows)
    return codes


def _exponential(scaled: Tensor, heights: Tensor) -> Tensor:
    """Return ``exp(scaled - heights)``, in the memory of `scaled` if no gradient needs it."""
    return (scaled - heights).exp() if scaled.requires_grad else scaled.sub_(heights).exp_()


def _product(codes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``codes * rows * columns``, in the memory of `codes` if no gradient needs it."""
    return codes * rows * columns if codes.requires_grad else codes.mul_(rows).mul_(columns)


def swav_loss(
    scores: Tensor, *, n_assigned: int = 2, temperature: float = 0.1, epsilon: float = 0.05, iterations: int = 3
) -> Tensor:
    r"""Return SwAV's loss, the mean cross entropy over samples and pairs of different views t, s.

    .. math:: L_{ts} = -\sum_k Q_{tk} \log P_{sk}, \quad Q_t = \operatorname{sinkhorn}(\operatorname{sg} S_t), \quad
        P_s = \operatorname{softmax}(S_s / \tau)

    t runs over the first `n_assigned` views. The gradient with respect to :math:`S_s` is the mean over t of :math:`(P_s
    - Q_t) / \tau`. With the block open, the gradient with respect to the codes, :math:`-\log P_s`, is pulled back
    through all turns of `sinkhorn` to :math:`S_t` as well.

    Args:
        scores: Products S of unit embeddings and prototypes, (V, N, K).
        n_assigned: Views that get codes, the large crops: at most V.
        temperature: tau.
        epsilon: As in `sinkhorn`.
        iterations: As in `sinkhorn`.

    Returns:
        A scalar, in nats per sample and pair; half precision is computed in float32.

    Raises:
        ValueError: If a number is out of its range, or `scores` is not (V, N, K).

    References:
        Caron, Misra, Mairal, Goyal, Bojanowski and Joulin, "Unsupervised learning of visual features by contrasting
        cluster assignments", 2020, equation 2.

    Example:
        >>> scores = torch.tensor([[[0.1, 0.0], [0.0, 0.1]], [[0.2, 0.0], [0.0, 0.2]]])
        >>> swav_loss(scores)
        tensor(0.3483)
    """
    temperature = number("temperature", temperature, above=0)
    views("scores", scores)
    if scores.ndim != 3:
        raise ValueError(f"`scores` should have shape (views, samples, prototypes). Found {tuple(scores.shape)}.")
    assigned = stop_gradient(scores[: integer("n_assigned", n_assigned, most=len(scores))], SWAV_CODES)
    codes = sinkhorn(assigned, epsilon=epsilon, iterations=iterations)
    return cross_view_entropy(codes, (wide(scores) / temperature).log_softmax(-1))


def _check_center(center: Tensor, outputs: Tensor) -> None:
    floating(center=center, teacher=outputs)
    if center.shape != outputs.shape[-1:]:
        raise ValueError(f"`center` should have shape {tuple(outputs.shape[-1:])}. Found {tuple(center.shape)}.")
