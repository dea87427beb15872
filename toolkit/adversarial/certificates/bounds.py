"""Bounds of the logits over all inputs of a ball: intervals to train with, linear relaxations to certify with.

Every bound holds for the model in evaluation mode. Certificates are computed in float64 for any dtype of the inputs and
the model, and rounded outward: they hold for its weights in exact arithmetic. The other bounds and the loss are
computed in the dtype of the inputs, also under ``torch.autocast``, and hold up to the rounding of this dtype.

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit._tensors import exact_products
from toolkit.adversarial._classes import check_classes
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.balls.box import check_inputs
from toolkit.adversarial.certificates._farthest import BallAndBox, ball_and_box
from toolkit.adversarial.certificates._layers import (
    AFFINE,
    RESHAPING,
    affine_chain,
    check_logits,
    plain_layers,
    roundings_of,
    run_affine,
    run_sizes,
)
from toolkit.adversarial.certificates._linear_relaxation import (
    EPSILON,
    Interval,
    errors_of,
    pieces,
    relaxed_bounds,
    relaxed_lower_bound,
    rounding,
    width_of,
)
from toolkit.blocks import no_graph

__all__ = ["certify_crown", "certify_interval", "crown_bounds", "interval_bounds", "interval_loss"]


def interval_bounds(model: nn.Module, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of the logits for all inputs between `lower` and `upper`, by interval arithmetic.

    An affine layer maps the interval ``m +- r`` to ``W m + b +- |W| r``, and a nondecreasing activation maps ends to
    ends. Differentiable in the parameters and the inputs. Ends may be infinite.

    Args:
        model: A `torch.nn.Sequential` of affine layers (Linear, Conv1d, Conv2d, BatchNorm1d and 2d, AvgPool2d,
            AdaptiveAvgPool2d, `Normalize`), nondecreasing activations (ReLU, LeakyReLU, ELU, Softplus, Sigmoid, Tanh,
            MaxPool1d and 2d), Flatten, Unflatten, Identity, dropout and Sequential. Batch normalisation uses its
            running statistics and dropout is off, in any mode of the model.
        lower: Least inputs, (N, ...), floating point.
        upper: Greatest inputs, (N, ...).

    Returns:
        The least and the greatest logits, each (N, C).

    Raises:
        TypeError: If the model has other layers, or hooks, or the bounds are not floating point.
        ValueError: If the shapes differ, `lower` is above `upper` somewhere, or there is no finite number between them.

    References:
        Gowal et al., "On the effectiveness of interval bound propagation for training verifiably robust models", 2018.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> _ = model[0].load_state_dict({"weight": torch.tensor([[1.0, -2.0]]), "bias": torch.zeros(1)})
        >>> lower, upper = interval_bounds(model, torch.zeros(1, 2), torch.ones(1, 2))
        >>> lower.item(), upper.item()
        (-2.0, 1.0)
    """
    _check_interval(lower, upper)
    with exact_products(lower.device):
        return _through(plain_layers(model), Interval(lower, upper))


def interval_loss(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Return an upper bound of the mean worst-case cross entropy in a Linf ball: the loss of certified training.

    ``log(1 + sum_{j != y} exp(-m_j))`` with lower bounds ``m_j`` of the margins ``z_y - z_j``. A margin is bounded as
    the output of a layer with weights ``w_y - w_j`` on the last hidden interval, which is tighter than the difference
    of two bounds. The gradient is the full gradient of this bound, without blocks.

    In training, epsilon should grow from a small value, and the plain cross entropy should be a part of the loss.

    Args:
        model: As in `interval_bounds`, from inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,), integers of any width.
        epsilon: Radius of the ball; one for all, or (N,).
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.
        mask: True where an input may change, broadcast to `x`; None: everywhere.

    Returns:
        A scalar, in nats per sample.

    Raises:
        TypeError: If the model has other layers, or hooks, `x` is not floating point, `labels` are not integers, or
            `mask` is not Boolean.
        ValueError: If shapes do not fit, a label is not a class, `epsilon` is negative or not finite, or `x` lies
            outside of `bounds`.

    References:
        Gowal et al., "On the effectiveness of interval bound propagation for training verifiably robust models", 2018.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = model[0].load_state_dict({"weight": torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
        >>> x = torch.full((1, 2), 0.5)
        >>> f"{interval_loss(model, x, torch.tensor([0]), epsilon=0.5).item():.4f}"
        '0.6931'
    """
    check_inputs("x", x)
    ball = ball_and_box(x, epsilon, "linf", bounds, mask, x.dtype)
    with exact_products(x.device):
        margins, index = _interval_margins(model, x.shape, labels, ball)
    return F.cross_entropy(-margins, index)  # the margin of the label itself is 0


def certify_interval(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Return a lower bound of the worst-case margin in a Linf ball, by intervals.

    A sample with a positive result is certified; the others are undecided. Computed in float64. The arguments are
    those of `interval_loss`.

    Returns:
        (N,), float64, in the units of the logits. Never above the worst-case margin ``min_{j != y} z_y - z_j`` in exact
        arithmetic.

    Raises:
        TypeError: As in `interval_loss`.
        ValueError: As in `interval_loss`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = model[0].load_state_dict({"weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
        >>> certify_interval(model, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5)
        tensor([3.5000], dtype=torch.float64)
    """
    with no_graph():
        ball = ball_and_box(x, epsilon, "linf", bounds, mask)
        margins, index = _interval_margins(model, x.shape, labels, ball, outward=True)
        return margins.scatter(1, index[:, None], torch.inf).amin(1)


def crown_bounds(model: nn.Module, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of the logits for all inputs between `lower` and `upper`, by linear relaxation (CROWN).

    Each ReLU whose input may have either sign is enclosed by two lines, and the lines are followed back to the inputs,
    also for the bounds of every hidden layer. The tighter of this bound and the interval bound is taken, so the result
    is never looser than that of `interval_bounds`. Differentiable in the parameters.

    Args:
        model: As in `interval_bounds`, with ReLU as the only activation. Its layers become dense matrices.
        lower: Least inputs, (N, ...), floating point.
        upper: Greatest inputs, (N, ...).

    Returns:
        The least and the greatest logits, each (N, C).

    Raises:
        TypeError: If the model has other layers, or hooks, or the bounds are not floating point.
        ValueError: If the shapes differ, `lower` is above `upper` somewhere, or an end is infinite.

    References:
        Zhang, Weng, Chen, Hsieh and Daniel, "Efficient neural network robustness certification with general activation
        functions", 2018.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> lower, upper = crown_bounds(model, torch.zeros(1, 1), torch.ones(1, 1))
        >>> bool(lower <= model(torch.tensor([[0.3]])) <= upper)
        True
    """
    _check_interval(lower, upper)
    if not (lower.isfinite() & upper.isfinite()).all():
        raise ValueError("`lower` and `upper` should be finite. Found infinite ends, which `interval_bounds` takes.")
    with no_graph():
        down, up = lower.flatten(1), upper.flatten(1)
        middle = down / 2 + up / 2  # the sum itself may overflow
        reach = torch.full_like(middle[:, :1], torch.finfo(middle.dtype).max)
        ball = BallAndBox("linf", middle, reach, down - middle, up - middle)
    with exact_products(lower.device):
        return relaxed_bounds(affine_chain(model, lower, lower.dtype), ball)[-1]


def certify_crown(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Return a lower bound of the worst-case margin, by linear relaxation (CROWN).

    A sample with a positive result is certified; the others are undecided. The resulting linear function of the inputs
    is minimised exactly on the intersection of ball and box, in every norm: ``"linf"``, ``"l2"`` or ``"l1"``. Computed
    in float64. The model is as in `crown_bounds`; the other arguments are those of `interval_loss`.

    Returns:
        (N,), float64, in the units of the logits. Never above the worst-case margin ``min_{j != y} z_y - z_j`` in exact
        arithmetic; equal to it, but for rounding, for a model without activations.

    Raises:
        TypeError: As in `interval_loss`.
        ValueError: As in `interval_loss`, or if `norm` is unknown.

    References:
        Zhang, Weng, Chen, Hsieh and Daniel, "Efficient neural network robustness certification with general activation
        functions", 2018.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = model[0].load_state_dict({"weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
        >>> certify_crown(model, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2")
        tensor([4.5000], dtype=torch.float64)
    """
    with no_graph():
        ball = ball_and_box(x, epsilon, norm, bounds, mask)
        chain = affine_chain(model, x, torch.float64)
        *rectified, last = chain
        index = model_labels(labels, x, len(last.bias))
        hidden = relaxed_bounds(rectified, ball, outward=True)
        *errors, error = errors_of(chain, hidden, ball)
        error = error + error.gather(1, index[:, None])
        found = []
        for rows in pieces(len(x), len(last.bias) * width_of(rectified, ball)):
            weight, bias = margin_layer(last.weight, last.bias, index[rows])
            margins, _ = relaxed_lower_bound(
                weight,
                bias - error[rows],
                rectified,
                [interval.rows(rows) for interval in hidden],
                ball.rows(rows),
                [part[rows] for part in errors],
            )
            found.append(margins.scatter(1, index[rows, None], torch.inf).amin(1))
        return torch.cat(found)


def margin_layer(weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights (N, C, M) and biases (N, C) of the margins ``z_y - z_j``; both are 0 for the label."""
    return weight[labels][:, None] - weight, bias[labels][:, None] - bias


def model_labels(labels: Tensor, x: Tensor, n_classes: int) -> Tensor:
    """Return the labels as an index; raise if they, or the number of logits of the model, do not fit."""
    if n_classes < 2:
        raise ValueError(f"`model` should return at least two logits. Found {n_classes}.")
    return check_classes("labels", labels, len(x), n_classes)


def _check_interval(lower: Tensor, upper: Tensor) -> None:
    check_inputs("lower", lower)
    check_inputs("upper", upper)
    if lower.shape != upper.shape:
        raise ValueError(
            f"`lower` and `upper` should have one shape (N, ...). Found {tuple(lower.shape)} and {tuple(upper.shape)}."
        )
    if not (lower <= upper).all():
        raise ValueError("`lower` should not be above `upper`. Found coordinates where it is.")
    if (lower == math.inf).any() or (upper == -math.inf).any():
        raise ValueError("`lower` and `upper` should have a finite number between them. Found two equal infinite ends.")


def _with_jump(layer: nn.Softplus, interval: Interval, ends: Interval) -> Interval:
    """Widen the values of an interval around the threshold, behind which torch goes on with x itself, a step below."""
    edge = layer.threshold / layer.beta
    before = edge + math.log1p(math.exp(-layer.threshold)) / layer.beta
    crosses = (interval.lower <= edge) & (edge <= interval.upper)
    lower = torch.where(crosses, ends.lower.clamp(max=min(edge, before)), ends.lower)
    return Interval(lower, torch.where(crosses, ends.upper.clamp(min=max(edge, before)), ends.upper))


def _through(layers: list[nn.Module], interval: Interval, *, outward: bool = False) -> Interval:
    """Carry an interval through layers one by one; `outward`, for float64, makes up for rounding."""
    ends = interval
    for layer in layers:
        if type(layer) in AFFINE:
            ends = _through_affine(layer, ends, outward=outward)
        else:
            # A copy for layers that write into their input: the input may be the caller's, and both ends may be one
            # tensor.
            copied = getattr(layer, "inplace", False)
            before = ends
            ends = Interval(*(layer.forward(side.clone() if copied else side) for side in before))
            if isinstance(layer, nn.Softplus):
                ends = _with_jump(layer, before, ends)
            if outward and isinstance(layer, _ROUNDED):
                ends = _widened(ends, rounding(0) * (_unit(layer) + _reach(before) + _reach(ends)))
        if type(layer) in RESHAPING and len(ends.lower) != len(interval.lower):
            raise TypeError(f"`model` should keep the samples of a batch apart. Found {layer}.")
    return ends


def _through_affine(layer: nn.Module, ends: Interval, *, outward: bool) -> Interval:
    """Return ``W m + b -+ |W| r``; infinite where an infinite end has a weight."""
    lower, upper = ends
    zero, open_below, open_above = lower.new_zeros(1), lower.isinf(), upper.isinf()
    is_open = bool((open_below | open_above).any())
    if is_open:  # any number in place of an infinite end: where it has a weight, the result is infinite
        lower = torch.where(open_below, torch.where(open_above, 0, upper), lower)
        upper = torch.where(open_above, lower, upper)
    middle = run_affine(layer, lower / 2 + upper / 2)
    half = run_affine(layer, upper / 2 - lower / 2, shift=zero, weight=torch.abs)
    found = Interval(middle - half, middle + half)
    if outward:
        size = run_sizes(layer, _reach(Interval(lower, upper)))
        found = _widened(found, rounding(roundings_of(layer, lower)) * size)
    if is_open:
        below, above = open_below.to(lower.dtype), open_above.to(lower.dtype)

        def reached(up: Tensor, down: Tensor) -> Tensor:
            """Return the outputs with a positive weight on one end, or a negative weight on the other."""
            if isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
                return run_affine(layer, up) > 0
            rising = run_affine(layer, up, shift=zero, weight=lambda weight: (weight > 0).to(up.dtype))
            falling = run_affine(layer, down, shift=zero, weight=lambda weight: (weight < 0).to(up.dtype))
            return rising + falling > 0

        found = Interval(
            torch.where(reached(below, above), -math.inf, found.lower),
            torch.where(reached(above, below), math.inf, found.upper),
        )
    return found


def _reach(ends: Interval) -> Tensor:
    return torch.maximum(ends.lower.abs(), ends.upper.abs())


def _widened(ends: Interval, error: Tensor) -> Interval:
    return Interval(ends.lower - error, ends.upper + error)


# Activations whose values are rounded.
_ROUNDED = (nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Sigmoid, nn.Tanh)


def _unit(layer: nn.Module) -> float:
    """Return the size of the numbers inside of an activation's formula, beside its input and its output."""
    return 0.0 if isinstance(layer, nn.LeakyReLU | nn.Softplus) else getattr(layer, "alpha", 1.0)


def _interval_margins(
    model: nn.Module, shape: torch.Size, labels: Tensor, ball: BallAndBox, *, outward: bool = False
) -> tuple[Tensor, Tensor]:
    """Return lower bounds of ``z_y - z_j``, (N, C), and the labels as an index, for inputs of a shape (N, ...)."""
    below, above = ball.enclosing()
    input = Interval((ball.start + below).reshape(shape), (ball.start + above).reshape(shape))
    if outward:
        input = _widened(input, EPSILON * (ball.start.abs() + torch.maximum(-below, above)).reshape(shape))
    layers = plain_layers(model)
    if layers and isinstance(layers[-1], nn.Linear):
        last = layers[-1]
        ends = _through(layers[:-1], input, outward=outward)
        weight = last.weight.to(ends.lower)
        check_logits((*ends.lower.shape[:-1], len(weight)))
        bias = weight.new_zeros(len(weight)) if last.bias is None else last.bias.to(weight)
        index = model_labels(labels, ball.start, len(weight))
        difference, constant = margin_layer(weight, bias, index)
        middle, half = ends.lower / 2 + ends.upper / 2, ends.upper / 2 - ends.lower / 2
        margins = (difference @ middle[:, :, None] - difference.abs() @ half[:, :, None])[..., 0] + constant
        if outward:
            error = rounding(roundings_of(last, middle)) * run_sizes(last, _reach(ends))
            margins = margins - error - error.gather(1, index[:, None])
        return margins, index
    ends = _through(layers, input, outward=outward)
    check_logits(ends.lower.shape)
    index = model_labels(labels, ball.start, ends.lower.shape[1])
    own = ends.lower.gather(1, index[:, None])
    margins = own - ends.upper
    if outward:
        margins = margins - EPSILON * margins.abs()
    return margins.scatter(1, index[:, None], 0), index
