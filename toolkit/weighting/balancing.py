r"""Weights that balance several losses, or several samples, and are held constant.

A loss divided by its own held value has the gradient of its logarithm. Without the block the quotient is the constant
1 and nothing learns; a ratio of two losses makes the second one vanish. Where the weight is itself an optimum, as the
variances of a profiled likelihood, the block is redundant: the derivative with respect to an optimum is zero.

T losses or tasks, N samples; ``*`` leading dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from toolkit._checks import number
from toolkit._tensors import floating, floating_alike, lengths, promoted, tensors
from toolkit.blocks import block, is_blocked, stop_gradient

__all__ = [
    "ADAPTIVE_WEIGHT",
    "GRADNORM_TARGET",
    "IMPORTANCE_WEIGHTS",
    "LOSS_RATIOS",
    "NLL_WEIGHTS",
    "OWN_LOSSES",
    "PROFILED_VARIANCES",
    "adaptive_weight",
    "beta_nll_loss",
    "gradnorm_loss",
    "importance_weighted_loss",
    "profiled_uncertainty_loss",
    "ratio_balanced_loss",
    "self_normalized_loss",
    "uncertainty_loss",
]

OWN_LOSSES = block(
    "weighting.own_losses",
    "The value by which a loss is divided: it only sets the scale, and differentiated it would cancel the loss.",
)
LOSS_RATIOS = block(
    "weighting.loss_ratios",
    "The ratios bring all losses to the size of the first; differentiated, they replace each loss by the first.",
)
PROFILED_VARIANCES = block(
    "weighting.profiled_variances",
    "The variances are optimal for the losses, so the derivative through them is zero and need not be computed.",
)
GRADNORM_TARGET = block(
    "weighting.gradnorm_target",
    "The common gradient norm is a goal for every weight; differentiated, the weights would move the goal instead.",
)
ADAPTIVE_WEIGHT = block(
    "weighting.adaptive_weight",
    "The ratio of two gradient norms only sets the pace of the second loss; its derivative needs second derivatives.",
)
IMPORTANCE_WEIGHTS = block(
    "weighting.importance_weights",
    "How much each sample counts comes from two densities; the model should not learn to make its errors count less.",
)
NLL_WEIGHTS = block(
    "weighting.nll_weights",
    "The predicted variance decides how much a sample counts; differentiated, it would be rewarded for counting less.",
)

Losses = Tensor | Sequence[Tensor]


def self_normalized_loss(losses: Losses) -> Tensor:
    r"""Return :math:`\sum_i L_i / \mathrm{sg}(L_i)`, whose value is the number of losses: all losses count equally.

    With the block `OWN_LOSSES` in place the gradient is that of :math:`\sum_i \log L_i`. Opened, it is exactly 0.

    Args:
        losses: Positive, (\*, T), or a sequence of T tensors of equal shape.

    Returns:
        (\*). The value carries no information: report the losses. A loss of 0 counts 0; a negative loss gives NaN.

    Raises:
        ValueError: If losses of a sequence differ in shape.

    References:
        Chennupati, Sistu, Yogamani and Rawashdeh, "MultiNet++: multi-stream feature aggregation and geometric loss
        strategy for multi-task learning", 2019, minimise the geometric mean, which has this direction.

    Example:
        >>> x = torch.tensor([2.0, 5.0], requires_grad=True)
        >>> self_normalized_loss(x**2).backward()
        >>> x.grad
        tensor([1.0000, 0.4000])
    """
    stacked = _stacked(losses)
    return (stacked / stop_gradient(_positive(stacked), OWN_LOSSES)).sum(-1)


def ratio_balanced_loss(losses: Losses) -> Tensor:
    r"""Return :math:`L_1 + \sum_{i>1} \mathrm{sg}(L_1 / L_i) L_i`: all losses are scaled to the size of the first.

    With the block `LOSS_RATIOS` in place the gradient is :math:`L_1 \nabla \sum_i \log L_i`, in general that of no
    loss. Opened, it is :math:`T \nabla L_1`: the other losses vanish.

    Args:
        losses: As in `self_normalized_loss`.

    Returns:
        (\*), equal to T times the first loss.

    Raises:
        ValueError: If losses of a sequence differ in shape.

    References:
        The detached ratio in code that combines two losses, like the adaptive weight of Esser, Rombach and Ommer,
        "Taming transformers for high-resolution image synthesis", 2021, with losses in place of gradients.

    Example:
        >>> x = torch.tensor([2.0, 5.0], requires_grad=True)
        >>> ratio_balanced_loss(x**2).backward()
        >>> x.grad
        tensor([4.0000, 1.6000])
    """
    stacked = torch.atleast_1d(_stacked(losses))
    if not stacked.shape[-1]:
        raise ValueError(f"`losses` should have at least one loss. Found shape {tuple(stacked.shape)}.")
    ratios = (stacked[..., :1] / _positive(stacked[..., 1:])).clamp(max=torch.finfo(stacked.dtype).max)
    total: Tensor = stacked[..., 0] + (stop_gradient(ratios, LOSS_RATIOS) * stacked[..., 1:]).sum(-1)
    return total


def uncertainty_loss(losses: Losses, log_variances: Tensor) -> Tensor:
    r"""Return :math:`\frac12 \sum_i (e^{-s_i} L_i + s_i)`, a Gaussian likelihood of T tasks, in nats.

    The log-variances :math:`s_i` are learned beside the model, and nothing is held constant.

    Args:
        losses: (\*, T), or a sequence of T tensors of equal shape.
        log_variances: (T,), or (\*, T) as the losses.

    Returns:
        (\*).

    Raises:
        ValueError: If the shapes do not fit.

    References:
        Kendall, Gal and Cipolla, "Multi-task learning using uncertainty to weigh losses for scene geometry and
        semantics", 2018.

    Example:
        >>> uncertainty_loss(torch.tensor([4.0, 25.0]), torch.zeros(2))
        tensor(14.5000)
    """
    stacked = _stacked(losses)
    floating(log_variances=log_variances)
    if log_variances.shape not in (stacked.shape, stacked.shape[-1:]):
        raise ValueError(
            f"`log_variances` should have shape {tuple(stacked.shape[-1:])} or the shape of `losses`, "
            f"{tuple(stacked.shape)}. Found {tuple(log_variances.shape)}."
        )
    return 0.5 * (torch.exp(-log_variances) * stacked + log_variances).sum(-1)


def profiled_uncertainty_loss(losses: Losses) -> Tensor:
    r"""Return `uncertainty_loss` at its optimal log-variances :math:`s_i = \mathrm{sg}(\log L_i)`, in nats.

    The value is :math:`\frac12 \sum_i (1 + \log L_i)`, and the gradient half that of :math:`\sum_i \log L_i`, with the
    block `PROFILED_VARIANCES` in place and with it open: at an optimum the derivative through it is zero. In
    `self_normalized_loss`, which has the same weights without the term :math:`s_i`, the open gradient is 0.

    Args:
        losses: As in `self_normalized_loss`.

    Returns:
        (\*); NaN for a negative loss.

    Raises:
        ValueError: If losses of a sequence differ in shape.

    References:
        Kirchdorfer et al., "Analytical uncertainty-based loss weighting in multi-task learning", 2024.

    Example:
        >>> x = torch.tensor([2.0, 5.0], requires_grad=True)
        >>> profiled_uncertainty_loss(x**2).backward()
        >>> x.grad
        tensor([0.5000, 0.2000])
    """
    stacked = _stacked(losses)
    return uncertainty_loss(stacked, stop_gradient(_positive(stacked).log(), PROFILED_VARIANCES))


def gradnorm_loss(
    weights: Tensor, gradient_norms: Tensor, losses: Losses, initial_losses: Losses, *, alpha: float
) -> Tensor:
    r"""Return :math:`\sum_i |w_i G_i - \mathrm{sg}(\bar G r_i^\alpha)|`, the loss that learns the weights of T tasks.

    :math:`\bar G` is the mean of the :math:`w_i G_i`, and :math:`r_i` the loss over its first value, divided by the
    mean of these quotients. With the block `GRADNORM_TARGET` in place the gradient with respect to :math:`w_i` is
    :math:`\pm_i G_i`, with the sign of the difference. Opened, :math:`G_i \frac1T \sum_k \pm_k r_k^\alpha` is
    subtracted.

    Args:
        weights: w, (T,), the leaves to be learned.
        gradient_norms: G, (T,): norms of the losses' gradients, without weights, with respect to the last shared layer.
        losses: Current losses, (T,), or a sequence of T scalars.
        initial_losses: Losses at the first step, likewise.
        alpha: Strength of the pull on slow tasks; 0 makes all norms equal.

    Returns:
        A scalar.

    Raises:
        ValueError: If the shapes differ, or `alpha` is negative.

    References:
        Chen, Badrinarayanan, Lee and Rabinovich, "GradNorm: gradient normalization for adaptive loss balancing in deep
        multitask networks", 2018, equation 2.

    Example:
        >>> w = torch.tensor([1.3, 0.7], requires_grad=True)
        >>> gradnorm_loss(w, torch.tensor([2.0, 0.5]), torch.tensor([0.8, 1.4]), torch.ones(2), alpha=1.5).backward()
        >>> w.grad
        tensor([ 2.0000, -0.5000])
    """
    alpha = number("alpha", alpha, least=0)
    floating(weights=weights, gradient_norms=gradient_norms)
    now, first = _stacked(losses), _stacked(initial_losses, "initial_losses")
    shapes = [tuple(each.shape) for each in (weights, gradient_norms, now, first)]
    if len(set(shapes)) > 1:
        raise ValueError(f"`weights`, norms and losses should have the same shape. Found {shapes}.")
    norms, progress = weights * gradient_norms, now / _positive(first)
    rates = progress / _positive(progress.mean(-1, keepdim=True))
    goal = norms.mean(-1, keepdim=True) * rates**alpha
    return (norms - stop_gradient(goal, GRADNORM_TARGET)).abs().sum(-1)


def adaptive_weight(
    reconstruction_loss: Tensor,
    adversarial_loss: Tensor,
    last_layer: Tensor,
    *,
    delta: float = 1e-4,
    most: float = 1e4,
) -> Tensor:
    r"""Return the weight :math:`\|\nabla L_{rec}\| / (\|\nabla L_{adv}\| + \delta)` of an adversarial loss.

    Both gradients are those with respect to `last_layer`. With the block `ADAPTIVE_WEIGHT` in place
    ``reconstruction_loss + weight * adversarial_loss`` has the gradient :math:`g_{rec} + \lambda g_{adv}`, whose parts
    have nearly the same length at the last layer. Opened, second derivatives are added.

    Args:
        reconstruction_loss: A scalar that depends on `last_layer`.
        adversarial_loss: Likewise.
        last_layer: The weight of the last layer, of any shape.
        delta: Keeps the weight finite where the adversarial gradient vanishes.
        most: Upper bound of the weight.

    Returns:
        A scalar.

    Raises:
        ValueError: If `delta` or `most` is not positive, or a loss carries no gradient.

    References:
        Esser, Rombach and Ommer, "Taming transformers for high-resolution image synthesis", 2021, equation 7.

    Example:
        >>> w = torch.tensor([0.4, -0.9], requires_grad=True)
        >>> adaptive_weight((w - 1).square().sum(), -(w[0] * w[1] + w[0] ** 3), w)
        tensor(6.8695)
    """
    delta, most = number("delta", delta, above=0), number("most", most, above=0)
    tensors(reconstruction_loss=reconstruction_loss, adversarial_loss=adversarial_loss, last_layer=last_layer)
    first = _norm("reconstruction_loss", reconstruction_loss, last_layer)
    second = _norm("adversarial_loss", adversarial_loss, last_layer)
    return stop_gradient((first / (second + delta)).clamp(max=most), ADAPTIVE_WEIGHT)


def importance_weighted_loss(losses: Tensor, log_weights: Tensor) -> Tensor:
    r"""Return the weighted mean :math:`\sum_i \bar w_i L_i`, :math:`\bar w = \mathrm{softmax}(\log w)`.

    Self-normalised importance sampling: a mean under one distribution from samples of another. With the block
    `IMPORTANCE_WEIGHTS` in place the gradient is :math:`\sum_i \bar w_i \nabla L_i`. Opened,
    :math:`\sum_i \bar w_i (L_i - \bar L) \nabla \log w_i` is added, :math:`\bar L` the result.

    Args:
        losses: (\*, N).
        log_weights: Logarithms of density ratios, up to a constant, (\*, N); ``-inf`` leaves a sample out.

    Returns:
        (\*), 0 where all samples are left out.

    Raises:
        ValueError: If the shapes differ, or `log_weights` is not a floating-point tensor.

    References:
        Shimodaira, "Improving predictive inference under covariate shift by weighting the log-likelihood function",
        2000.

    Example:
        >>> importance_weighted_loss(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0]).log())
        tensor(2.)
    """
    losses = promoted(losses, log_weights)
    floating_alike(losses=losses, log_weights=log_weights)
    empty = (log_weights == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(log_weights.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    held = stop_gradient(weights, IMPORTANCE_WEIGHTS)
    return (held * losses.masked_fill(log_weights == -torch.inf, 0.0)).sum(-1)


def beta_nll_loss(input: Tensor, target: Tensor, var: Tensor, *, beta: float = 0.5, eps: float = 1e-6) -> Tensor:
    r"""Return :math:`\mathrm{sg}(v^\beta) \cdot \frac12 (\log v + (y - \mu)^2 / v)`, a weighted Gaussian likelihood.

    ``beta=0`` is the likelihood, in which the mean learns little where the variance is large; with ``beta=1`` the mean
    has the gradient of the squared error. With the block `NLL_WEIGHTS` in place the gradients are
    :math:`v^{\beta - 1} (\mu - y)` and :math:`\frac12 v^{\beta - 2} (v - (y - \mu)^2)`, for :math:`\beta \neq 0` not
    the gradients of any loss. Opened, :math:`\beta v^{\beta - 1}` times the negative log-likelihood is added to the
    latter.

    Args:
        input: Predicted means, (\*).
        target: y, (\*).
        var: Predicted variances v, (\*).
        beta: Exponent from 0 to 1.
        eps: Lower bound of the variances; below it they have gradient 0.

    Returns:
        (\*), without the constant of the likelihood.

    Raises:
        ValueError: If the shapes differ, `beta` is not from 0 to 1, or `eps` is not positive.

    References:
        Seitzer, Tavakoli, Antic and Martius, "On the pitfalls of heteroscedastic uncertainty estimation with
        probabilistic neural networks", 2022.

    Example:
        >>> beta_nll_loss(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([4.0]))
        tensor([2.3863])
    """
    beta, eps = number("beta", beta, least=0, most=1), number("eps", eps, above=0)
    target = promoted(target, input)
    floating_alike(input=input, target=target, var=var)
    v = var.clamp(min=eps)
    return stop_gradient(v**beta, NLL_WEIGHTS) * 0.5 * (v.log() + (target - input).square() / v)


def _norm(name: str, loss: Tensor, parameter: Tensor) -> Tensor:
    """Return the norm of a gradient, which is differentiable if its block is open."""
    graph = not is_blocked(ADAPTIVE_WEIGHT)
    if not loss.requires_grad:
        raise ValueError(f"`{name}` should depend on `last_layer`. Found a tensor without a graph.")
    (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, create_graph=graph, materialize_grads=True)
    return lengths(gradient.flatten()).squeeze(-1)


def _stacked(losses: Losses, name: str = "losses") -> Tensor:
    if not isinstance(losses, Tensor):
        if not isinstance(losses, Iterable):
            raise ValueError(f"`{name}` should be a tensor, or a sequence of them. Found {type(losses).__name__}.")
        losses = tuple(losses)
        for loss in losses:
            tensors(**{name: loss})
        shapes = [tuple(loss.shape) for loss in losses]
        if len(set(shapes)) != 1:
            raise ValueError(f"`{name}` should be tensors of one shape. Found {shapes}.")
        losses = torch.stack(losses, -1)
    floating(**{name: losses})
    return losses


def _positive(losses: Tensor) -> Tensor:
    """Return divisors that are not 0; NaN for a negative loss, whose weight would turn its gradient around."""
    return torch.where(losses < 0, torch.nan, losses.clamp(min=torch.finfo(losses.dtype).tiny))
