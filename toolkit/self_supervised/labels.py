r"""Learning with few labels: the model's own prediction on one view is the target for another view.

N samples, K classes, sg stops the gradient, p = softmax(logits).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from toolkit._checks import number
from toolkit._tensors import wide
from toolkit.blocks import block, stop_gradient
from toolkit.self_supervised._tensors import logits_alike, nats

__all__ = [
    "HARD_LABEL",
    "MEAN_TEACHER_TARGET",
    "SOFT_LABEL",
    "fixmatch_loss",
    "mean_teacher_loss",
    "soft_label_loss",
]

MEAN_TEACHER_TARGET = block(
    "self_supervised.mean_teacher_target",
    "The teacher's probabilities are a label: the student becomes consistent with the teacher, not both with both.",
)
HARD_LABEL = block(
    "self_supervised.hard_label",
    "The most likely class and the comparison with the threshold have no gradient, so the block only saves a graph.",
)
SOFT_LABEL = block(
    "self_supervised.soft_label",
    "The answer on the weak view is a label: it should not move towards the worse answer on the strong view.",
)


def mean_teacher_loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    r"""Return mean teacher's consistency cost, the mean over samples and classes of ``(p - sg(p'))^2``.

    With :math:`v = 2 (p - p') / NK`, the gradient is :math:`p \odot (v - p \cdot v)` for the student's logits and 0 for
    the teacher's. With the block open, the latter is :math:`-p' \odot (v - p' \cdot v)`.

    Args:
        student_logits: (\*, K).
        teacher_logits: (\*, K), of an `EMATeacher`.

    Returns:
        A scalar; half precision is computed in float32.

    Raises:
        ValueError: If the shapes differ, or the logits are integers.

    References:
        Tarvainen and Valpola, "Mean teachers are better role models: weight-averaged consistency targets improve
        semi-supervised deep learning results", 2017.

    Example:
        >>> mean_teacher_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[20.0, 0.0]]))
        tensor(0.2500)
    """
    logits_alike(student_logits=student_logits, teacher_logits=teacher_logits)
    target = wide(stop_gradient(teacher_logits, MEAN_TEACHER_TARGET)).softmax(-1)
    return mse_loss(wide(student_logits).softmax(-1), target)


def fixmatch_loss(strong: Tensor, weak: Tensor, *, threshold: float = 0.95) -> Tensor:
    r"""Return FixMatch's loss of unlabelled samples, with hard pseudo-labels: the mean over all samples.

    .. math:: L = -[\max_k \operatorname{sg} p_k(w) \ge \theta] \log p_y(s), \qquad
        y = \arg\max_k \operatorname{sg} p_k(w)

    The gradient with respect to the strong view's logits s is p(s) minus the indicator of y, over N, for the samples
    above the threshold. The weak view's logits w get no gradient, with the block and without it.

    Args:
        strong: Logits s of the strongly augmented view, (\*, K).
        weak: Logits w of the weakly augmented view, (\*, K).
        threshold: theta, from 0 to 1.

    Returns:
        A scalar, in nats per sample; 0 if no sample is above the threshold. Half precision is computed in float32.

    Raises:
        ValueError: If `threshold` is out of its range, the shapes differ, or the logits are integers.

    References:
        Sohn et al., "FixMatch: simplifying semi-supervised learning with consistency and confidence", 2020; Lee,
        "Pseudo-label: the simple and efficient semi-supervised learning method for deep neural networks", 2013.

    Example:
        >>> strong = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        >>> fixmatch_loss(strong, torch.tensor([[9.0, 0.0], [1.0, 0.0]]))
        tensor(0.3466)
    """
    threshold = number("threshold", threshold, least=0, most=1)
    logits_alike(strong=strong, weak=weak)
    confidence, label = wide(stop_gradient(weak, HARD_LABEL)).softmax(-1).max(-1, keepdim=True)
    each = -wide(strong).log_softmax(-1).gather(-1, label)
    return _of_the_sure(each, confidence, threshold)


def soft_label_loss(strong: Tensor, weak: Tensor, *, temperature: float = 1.0, threshold: float = 0.0) -> Tensor:
    r"""Return the cross entropy with soft pseudo-labels, sharpened by a temperature below 1: the mean over samples.

    .. math:: L = -[\max_k \operatorname{sg} p_k(w) \ge \theta] \sum_k q_k \log p_k(s), \qquad
        q = \operatorname{softmax}(\operatorname{sg}(w) / T)

    The gradient is :math:`(p(s) - q) / N` for the strong view's logits s and 0 for the weak view's logits w. With the
    block open, the latter is :math:`-q \odot (\log p(s) - q \cdot \log p(s)) / TN`. With the same logits for both and T
    = 1, the gradient is exactly 0 with the block, and that of the entropy without it.

    Args:
        strong: Logits s of the strongly augmented view, (\*, K).
        weak: Logits w of the weakly augmented view, (\*, K).
        temperature: T; towards 0 the labels become hard.
        threshold: theta, from 0 to 1, for the largest probability before sharpening.

    Returns:
        A scalar, in nats per sample; half precision is computed in float32.

    Raises:
        ValueError: If a number is out of its range, or the shapes differ.

    References:
        Xie, Dai, Hovy, Luong and Le, "Unsupervised data augmentation for consistency training", 2019.

    Example:
        >>> strong = torch.tensor([[1.0, 0.0]])
        >>> soft_label_loss(strong, torch.tensor([[0.0, 0.0]]))
        tensor(0.8133)
    """
    temperature = number("temperature", temperature, above=0)
    threshold = number("threshold", threshold, least=0, most=1)
    logits_alike(strong=strong, weak=weak)
    held = wide(stop_gradient(weak, SOFT_LABEL))
    each = nats((held / temperature).softmax(-1), wide(strong).log_softmax(-1))
    if threshold == 0:
        return each.mean()
    return _of_the_sure(each, held.softmax(-1).amax(-1), threshold)


def _of_the_sure(each: Tensor, confidence: Tensor, threshold: float) -> Tensor:
    """Return the mean with 0 for samples below the threshold; NaN if a confidence is."""
    return torch.where(confidence < threshold, 0, torch.where(confidence.isnan(), torch.nan, each)).mean()
