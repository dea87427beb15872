r"""Distributions of returns: categorical on fixed atoms (C51), and quantiles (QR-DQN).

The label is the whole distribution of :math:`r_t + \gamma_t Z_t`. With its block open the loss also makes the label
easier to predict: for a cross entropy the cheapest label is a single atom, for quantiles a single point. The
distributions collapse.

``*`` the dimensions of the batch, A actions, K atoms, N quantiles; time t-1 is ``tm1``. A ``discount_t`` is 0 at the
end of an episode. Half precision is computed in float32 and rounded once.

References:
    Bellemare, Dabney and Munos, "A distributional perspective on reinforcement learning", 2017.
    Dabney, Rowland, Bellemare and Munos, "Distributional reinforcement learning with quantile regression", 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, l1_loss

from toolkit._checks import number
from toolkit._tensors import tensors, wide
from toolkit.blocks import block, stop_gradient
from toolkit.value_learning._arguments import bootstrapped, chosen, floating, of_actions, of_shape

__all__ = [
    "CATEGORICAL_TARGET",
    "QUANTILE_TARGET",
    "categorical_double_q_learning",
    "categorical_l2_project",
    "categorical_q_learning",
    "categorical_td_learning",
    "quantile_q_learning",
    "quantile_regression_loss",
]

CATEGORICAL_TARGET = block(
    "value_learning.categorical_target",
    "The projected distribution of the return is a label: else it becomes one atom, the easiest label to predict.",
)
QUANTILE_TARGET = block(
    "value_learning.quantile_target",
    "The quantiles of the return are labels: else they move towards each other, where they are the easiest to match.",
)


def categorical_l2_project(z_p: Tensor, probs: Tensor, z_q: Tensor) -> Tensor:
    r"""Project a distribution from the atoms `z_p` onto the atoms `z_q`: each mass goes to its two neighbours.

    An atom between :math:`z_k` and :math:`z_{k+1}` gives :math:`z_{k+1}` the share :math:`(z - z_k) / (z_{k+1} - z_k)`
    of its mass and :math:`z_k` the rest; an atom outside of the range gives all of its mass to the nearer end. No mass
    is lost, and inside of the range the mean is unchanged.

    Args:
        z_p: (\*, J).
        probs: (\*, J).
        z_q: (K,), K at least 2, increasing, not necessarily evenly spaced.

    Returns:
        (\*, K), with NaN if `z_q` is not increasing.

    Raises:
        ValueError: If an argument is not a floating-point tensor, shapes differ, or `z_q` has fewer than two atoms.

    References:
        Bellemare, Dabney and Munos, 2017, algorithm 1.

    Example:
        >>> z, p = torch.tensor([-1.0, 0.0, 1.0, 2.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
        >>> categorical_l2_project(0.7 + 0.9 * z, p, z)
        tensor([0.0200, 0.1400, 0.2600, 0.5800])
    """
    _check_atoms(z_q=z_q)
    floating(z_p=z_p)
    of_shape(z_p.shape, "of `z_p`", probs=probs)
    gaps = z_q.diff()
    gaps = torch.where((gaps > 0).all(), gaps, math.nan)
    z = torch.minimum(torch.maximum(z_p, z_q[0]), z_q[-1]).contiguous()
    below = (torch.searchsorted(z_q, z, right=True) - 1).clamp(0, len(gaps) - 1)
    above_mass = probs * ((z - z_q[below]) / gaps[below])
    empty = above_mass.new_zeros((*z_p.shape[:-1], len(z_q)))
    return empty.scatter_add(-1, below, probs - above_mass).scatter_add(-1, below + 1, above_mass)


def categorical_td_learning(
    v_atoms_tm1: Tensor, v_logits_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_atoms_t: Tensor, v_logits_t: Tensor
) -> Tensor:
    r"""Return the cross entropy of a categorical value with its projected label, in nats.

    :math:`-\sum_k \operatorname{sg}(m_k) \log p_k`, with m the projection of the returns :math:`r_t + \gamma_t z`,
    which have the probabilities :math:`p'` of the next state. With `CATEGORICAL_TARGET` in place the gradient with
    respect to the logits is :math:`p - m`. Open, the next logits get :math:`p'_j (c_j - \sum_i p'_i c_i)`, where
    :math:`c_j` is the cross entropy of atom j alone: mass moves to the atom that is easiest to predict.

    Args:
        v_atoms_tm1: Atoms of the value before the step, (K,), increasing.
        v_logits_tm1: Their logits, (\*, K).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        v_atoms_t: Atoms of the value after the step, (J,).
        v_logits_t: Their logits, (\*, J).

    Returns:
        (\*), in nats.

    Raises:
        ValueError: If an argument is not a floating-point tensor, or a shape does not fit.

    References:
        Bellemare, Dabney and Munos, 2017, algorithm 1.

    Example:
        >>> z, one = torch.tensor([0.0, 1.0, 2.0]), torch.tensor(1.0)
        >>> logits = torch.tensor([0.0, 9.0, 0.0])
        >>> categorical_td_learning(z, logits, one, one, z, torch.tensor([9.0, 0.0, 0.0])).item() < 0.01
        True
    """
    _check_atoms(v_atoms_tm1=v_atoms_tm1, v_atoms_t=v_atoms_t)
    floating(v_logits_tm1=v_logits_tm1, v_logits_t=v_logits_t)
    batch = v_logits_tm1.shape[:-1]
    of_shape(torch.Size([*batch, len(v_atoms_tm1)]), "of its atoms", v_logits_tm1=v_logits_tm1)
    of_shape(torch.Size([*batch, len(v_atoms_t)]), "of its atoms", v_logits_t=v_logits_t)
    of_shape(batch, "of `v_logits_tm1` without its atoms", r_t=r_t, discount_t=discount_t)
    next_logits = wide(v_logits_t)
    return _cross_entropy(v_atoms_tm1, v_logits_tm1, r_t, discount_t, v_atoms_t, next_logits.softmax(-1))


def categorical_q_learning(
    q_atoms_tm1: Tensor,
    q_logits_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    q_atoms_t: Tensor,
    q_logits_t: Tensor,
) -> Tensor:
    r"""Return the loss of C51: `categorical_td_learning` towards the next action with the highest mean.

    With `CATEGORICAL_TARGET` open the leak goes to the logits of that next action alone.

    Args:
        q_atoms_tm1: Atoms of the values before the step, (K,), increasing.
        q_logits_tm1: Their logits for each action, (\*, A, K).
        a_tm1: Actions taken, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        q_atoms_t: Atoms of the values after the step, (J,).
        q_logits_t: Their logits for each action, (\*, A, J).

    Returns:
        (\*), in nats.

    Raises:
        ValueError: If values are not floating-point tensors, actions no integers below A, or a shape does not fit.

    References:
        Bellemare, Dabney and Munos, 2017, algorithm 1.

    Example:
        >>> z, logits = torch.tensor([0.0, 1.0]), torch.zeros(2, 2)
        >>> categorical_q_learning(z, logits, torch.tensor(1), torch.tensor(0.0), torch.tensor(1.0), z, logits)
        tensor(0.6931)
    """
    _check_atoms(q_atoms_t=q_atoms_t)
    tensors(q_logits_t=q_logits_t)
    of_shape(torch.Size([*q_logits_t.shape[:-1], len(q_atoms_t)]), "of its atoms", q_logits_t=q_logits_t)
    logits, atoms = map(wide, (q_logits_t, q_atoms_t))
    q_t = (logits.softmax(-1) * atoms).sum(-1)
    return categorical_double_q_learning(q_atoms_tm1, q_logits_tm1, a_tm1, r_t, discount_t, q_atoms_t, q_logits_t, q_t)


def categorical_double_q_learning(
    q_atoms_tm1: Tensor,
    q_logits_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    q_atoms_t: Tensor,
    q_logits_t: Tensor,
    q_t_selector: Tensor,
) -> Tensor:
    r"""Return the loss of `categorical_q_learning` with the next action chosen by other values.

    The selector is usually the online network's means. With `CATEGORICAL_TARGET` open the leak goes to `q_logits_t`.
    The selector gets no gradient in either case.

    Args:
        q_atoms_tm1: As in `categorical_q_learning`, like all arguments below.
        q_logits_tm1: (\*, A, K).
        a_tm1: (\*).
        r_t: (\*).
        discount_t: (\*).
        q_atoms_t: (J,).
        q_logits_t: Logits whose distribution enters the label, (\*, A, J).
        q_t_selector: Values that choose the action after the step, (\*, A).

    Returns:
        (\*), in nats.

    Raises:
        ValueError: As in `categorical_q_learning`.

    References:
        Bellemare, Dabney and Munos, 2017; with two networks: Hessel et al., "Rainbow: combining improvements in deep
        reinforcement learning", 2018.

    Example:
        >>> z, one, action = torch.tensor([0.0, 1.0]), torch.tensor(1.0), torch.tensor(1)
        >>> logits, selector = torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([0.0, 2.0])
        >>> categorical_double_q_learning(z, logits, action, 0 * one, one, z, logits, selector)
        tensor(0.0012)
    """
    _check_atoms(q_atoms_tm1=q_atoms_tm1, q_atoms_t=q_atoms_t)
    floating(q_logits_tm1=q_logits_tm1, q_logits_t=q_logits_t)
    batch, n_actions = _batch_and_actions("q_logits_tm1", q_logits_tm1, -2)
    of_shape(torch.Size([*batch, n_actions, len(q_atoms_tm1)]), "of its atoms", q_logits_tm1=q_logits_tm1)
    after = torch.Size([*batch, n_actions, len(q_atoms_t)])
    of_shape(after, "of its atoms", q_logits_t=q_logits_t)
    of_shape(q_logits_tm1.shape[:-1], "of `q_logits_tm1` without its atoms", q_t_selector=q_t_selector)
    of_shape(batch, "of `q_logits_tm1` without actions and atoms", r_t=r_t, discount_t=discount_t)
    of_actions(batch, "of `r_t`", a_tm1=a_tm1)
    next_logits = wide(chosen(q_logits_t, q_t_selector.argmax(-1), -2))
    logits = chosen(q_logits_tm1, a_tm1, -2)
    return _cross_entropy(q_atoms_tm1, logits, r_t, discount_t, q_atoms_t, next_logits.softmax(-1))


def quantile_regression_loss(dist_src: Tensor, tau_src: Tensor, dist_target: Tensor, *, huber_param: float) -> Tensor:
    r"""Return the quantile Huber loss of quantiles, with samples as targets.

    .. math:: \sum_i \frac1M \sum_j |\tau_i - 1[u_{ij} < 0]| \, L_\kappa(u_{ij}), \qquad u_{ij} = y_j - \theta_i

    :math:`L_\kappa(u)` is :math:`u^2 / 2` up to :math:`|u| = \kappa` and :math:`\kappa (|u| - \kappa / 2)` beyond; for
    :math:`\kappa = 0` it is :math:`|u|`. It is not divided by :math:`\kappa`.

    Args:
        dist_src: The quantiles :math:`\theta`, (\*, N).
        tau_src: Their probabilities :math:`\tau`, (N,) or (\*, N).
        dist_target: The samples y, (\*, M).
        huber_param: :math:`\kappa`, not negative, in units of the return.

    Returns:
        (\*), in units of the return; squared units for :math:`\kappa > 0`.

    Raises:
        ValueError: If an argument is not a floating-point tensor, a shape does not fit, or `huber_param` is negative.

    References:
        Dabney, Rowland, Bellemare and Munos, 2018, the quantile Huber loss.

    Example:
        >>> median, half = torch.tensor([0.0]), torch.tensor([0.5])
        >>> quantile_regression_loss(median, half, torch.tensor([1.0, 3.0]), huber_param=0)
        tensor(1.)
    """
    kappa = number("huber_param", huber_param, least=0)
    floating(dist_src=dist_src, tau_src=tau_src, dist_target=dist_target)
    batch, n_quantiles = _batch_and_actions("dist_src", dist_src, -1)
    if tau_src.shape != (n_quantiles,):
        of_shape(dist_src.shape, "of `dist_src`, or of its last dimension", tau_src=tau_src)
    of_shape(torch.Size([*batch, *dist_target.shape[-1:]]), "of `dist_src` up to the last", dist_target=dist_target)
    _batch_and_actions("dist_target", dist_target, -1)
    dtype = dist_src.dtype
    dist_src, tau_src, dist_target = map(wide, (dist_src, tau_src, dist_target))
    pairs = torch.Size([*dist_src.shape, dist_target.shape[-1]])
    theta, y, tau = dist_src.unsqueeze(-1).expand(pairs), dist_target.unsqueeze(-2).expand(pairs), tau_src.unsqueeze(-1)
    losses = huber_loss(theta, y, reduction="none", delta=kappa) if kappa else l1_loss(theta, y, reduction="none")
    return (torch.where(y < theta, 1 - tau, tau) * losses).mean(-1).sum(-1).to(dtype)


def quantile_q_learning(
    dist_q_tm1: Tensor,
    tau_q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    dist_q_t_selector: Tensor,
    dist_q_t: Tensor,
    *,
    huber_param: float,
) -> Tensor:
    r"""Return the loss of QR-DQN, `quantile_regression_loss` with the labels :math:`r_t + \gamma_t \theta'`.

    :math:`\theta'` are the quantiles of the next action, the one with the highest mean by `dist_q_t_selector`. With
    `QUANTILE_TARGET` open each of these quantiles gets
    :math:`\frac{\gamma_t}{M} \sum_i |\tau_i - 1[u_{ij} < 0]| \, L_\kappa'(u_{ij})`: label and prediction meet halfway.

    Args:
        dist_q_tm1: Quantiles before the step, (\*, N, A).
        tau_q_tm1: Their probabilities, (N,) or (\*, N).
        a_tm1: Actions taken, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        dist_q_t_selector: Quantiles after the step that choose the next action, (\*, L, A).
        dist_q_t: Quantiles after the step that enter the label, (\*, M, A).
        huber_param: :math:`\kappa`: 1 in the paper, 0 for the quantile loss without Huber's.

    Returns:
        (\*); units as in `quantile_regression_loss`.

    Raises:
        ValueError: If values are not floating-point tensors, actions no integers below A, a shape does not fit, or
            `huber_param` is negative.

    References:
        Dabney, Rowland, Bellemare and Munos, 2018, algorithm 1.

    Example:
        >>> q, one, action = torch.tensor([[0.0], [1.0]]), torch.tensor(1.0), torch.tensor(0)
        >>> quantile_q_learning(q, torch.tensor([0.25, 0.75]), action, 0 * one, one, q, q, huber_param=1)
        tensor(0.1250)
    """
    floating(dist_q_tm1=dist_q_tm1, tau_q_tm1=tau_q_tm1, dist_q_t=dist_q_t, dist_q_t_selector=dist_q_t_selector)
    (*batch, _), n_actions = _batch_and_actions("dist_q_tm1", dist_q_tm1, -1, least=2)
    for name, dist in (("dist_q_t_selector", dist_q_t_selector), ("dist_q_t", dist_q_t)):
        _batch_and_actions(name, dist, -2)
        wanted = torch.Size([*batch, *dist.shape[-2:-1], n_actions])
        of_shape(wanted, "of `dist_q_tm1` but for its quantiles", **{name: dist})
    of_shape(torch.Size(batch), "of `dist_q_tm1` without quantiles and actions", r_t=r_t, discount_t=discount_t)
    of_actions(torch.Size(batch), "of `r_t`", a_tm1=a_tm1)
    best = wide(dist_q_t_selector).mean(-2).argmax(-1)
    following = chosen(dist_q_t, best[..., None].expand(*batch, dist_q_t.shape[-2]))
    label = bootstrapped(wide(r_t)[..., None], wide(discount_t)[..., None], wide(following))
    prediction = chosen(dist_q_tm1, a_tm1[..., None].expand(*batch, dist_q_tm1.shape[-2]))
    return quantile_regression_loss(
        prediction, tau_q_tm1, stop_gradient(label, QUANTILE_TARGET), huber_param=huber_param
    )


def _cross_entropy(
    atoms: Tensor, logits: Tensor, r_t: Tensor, discount_t: Tensor, next_atoms: Tensor, next_probs: Tensor
) -> Tensor:
    """Return the cross entropy of the logits with the projected distribution of the return, (*)."""
    dtype = logits.dtype
    atoms, logits, r_t, discount_t, next_atoms = map(wide, (atoms, logits, r_t, discount_t, next_atoms))
    returns = torch.addcmul(r_t[..., None], discount_t[..., None], next_atoms)
    label = stop_gradient(categorical_l2_project(returns, next_probs, atoms), CATEGORICAL_TARGET)
    log_probs = logits.log_softmax(-1)
    never = (label == 0) & log_probs.isneginf()  # 0 log 0 is 0
    return -(label * log_probs.masked_fill(never, 0.0)).sum(-1).to(dtype)


def _check_atoms(**atoms: Tensor) -> None:
    floating(**atoms)
    for name, value in atoms.items():
        if value.ndim != 1 or len(value) < 2:
            raise ValueError(f"`{name}` should be a vector of at least two atoms. Found shape {tuple(value.shape)}.")


def _batch_and_actions(name: str, values: Tensor, dim: int, least: int = 1) -> tuple[torch.Size, int]:
    """Return the dimensions before `dim`, and the size of `dim`, which has to be there."""
    least = max(-dim, least)
    if values.ndim < least or values.shape[dim] == 0:
        raise ValueError(f"`{name}` should have {least} dimensions or more, none empty. Found {tuple(values.shape)}.")
    return values.shape[:dim], values.shape[dim]
