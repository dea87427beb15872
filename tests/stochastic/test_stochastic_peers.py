"""Stochastic estimators beside torch's and Pyro's."""

import warnings

import pytest
import torch
from torch.distributions import Bernoulli, Independent, Normal, OneHotCategoricalStraightThrough
from values import doubles

from toolkit import stochastic, unblock
from toolkit.stochastic import (
    enumerated_loss,
    iwae_bound,
    iwae_loss,
    path_log_prob,
    score_function_loss,
    straight_through,
    vimco_loss,
)


@pytest.fixture(scope="module")
def pyro():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("pyro")
    yield found
    found.clear_param_store()


def test_torchs_straight_through_variables_have_the_same_values_and_gradients():
    logits = doubles(0.3, -1.2, 0.8).requires_grad_()
    of_samples = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = OneHotCategoricalStraightThrough(logits=logits)
    torch.manual_seed(0)
    theirs = q.rsample((5,))
    (by_them,) = torch.autograd.grad((theirs.square() * of_samples).sum(), logits, retain_graph=True)
    torch.manual_seed(0)
    ours = straight_through(q.sample((5,)), q.probs.expand(5, 3))
    (by_us,) = torch.autograd.grad((ours.square() * of_samples).sum(), logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(by_us, by_them)


def _gaussian(pyro):
    """A prior, a likelihood and a proposal, as Pyro's programs and as a function of the proposal's parameters."""
    dist = pyro.distributions

    def model():
        z = pyro.sample("z", dist.Normal(doubles(-0.2)[0], doubles(1.3)[0]))
        pyro.sample("x", dist.Normal(z, doubles(0.6)[0]), obs=doubles(0.9)[0])

    def guide():
        mean, scale = pyro.param("mean", lambda: doubles(0.5)[0]), pyro.param("scale", lambda: doubles(0.8)[0])
        pyro.sample("z", dist.Normal(mean, scale))

    def log_weights(mean, scale, noise):
        z = mean + scale * noise
        log_joint = Normal(doubles(-0.2)[0], doubles(1.3)[0]).log_prob(z) + Normal(z, doubles(0.6)[0]).log_prob(
            doubles(0.9)[0]
        )
        return log_joint - path_log_prob(Normal(mean, scale), z)

    return model, guide, log_weights


def test_pyros_renyi_bound_at_order_zero_is_the_importance_weighted_bound(pyro):
    pyro.clear_param_store()
    model, guide, log_weights = _gaussian(pyro)
    torch.manual_seed(3)
    value = pyro.infer.RenyiELBO(alpha=0, num_particles=3).loss_and_grads(model, guide)
    theirs = [pyro.param(name).grad.item() for name in ("mean", "scale")]

    torch.manual_seed(3)
    noise = torch.stack([torch.normal(doubles(0.0)[0], doubles(1.0)[0]) for _ in range(3)])
    mean, scale = (x.requires_grad_() for x in doubles(0.5, 0.8).unbind())
    with unblock(stochastic.DENSITY_PARAMETERS):
        log_w = log_weights(mean, scale, noise)
    assert -iwae_bound(log_w).item() == pytest.approx(value, rel=1e-12)
    assert [x.item() for x in torch.autograd.grad(iwae_loss(log_w), [mean, scale])] == pytest.approx(theirs, rel=1e-12)


def _discrete(pyro):
    """One bit: joint probabilities .06 and .42, and a proposal with logit phi."""
    dist = pyro.distributions

    def model():
        z = pyro.sample("z", dist.Bernoulli(doubles(0.7)[0]))
        pyro.sample("x", dist.Bernoulli(torch.where(z > 0, doubles(0.6)[0], doubles(0.2)[0])), obs=doubles(1.0)[0])

    def guide():
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("phi", lambda: doubles(0.4)[0])))

    phi = doubles(0.4)[0].requires_grad_()
    log_q = torch.nn.functional.logsigmoid(torch.stack([-phi, phi]))
    return model, guide, phi, log_q, doubles(0.06, 0.42).log()


def test_pyros_renyi_bound_gives_a_discrete_proposal_no_gradient(pyro):
    """Its score term is multiplied by alpha / (1 - alpha), which is 0 for the importance-weighted bound."""
    pyro.clear_param_store()
    model, guide, phi, log_q, log_joint = _discrete(pyro)
    bound = pyro.infer.RenyiELBO(alpha=0, num_particles=2)
    for seed in range(20):
        torch.manual_seed(seed)
        bound.loss_and_grads(model, guide)
        assert pyro.param("phi").grad.item() == 0

    pairs = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    losses = torch.stack([vimco_loss((log_joint - log_q)[pair], log_q[pair]) for pair in pairs])
    (ours,) = torch.autograd.grad(enumerated_loss(log_q[pairs].sum(1), losses), phi)
    assert ours.item() == pytest.approx(-0.1896853985, abs=1e-10)


def test_pyros_elbo_of_a_discrete_proposal_drops_the_score_of_mean_zero(pyro):
    model, guide, phi, log_q, log_joint = _discrete(pyro)
    for seed in range(5):
        pyro.clear_param_store()
        torch.manual_seed(seed)
        pyro.infer.Trace_ELBO().loss_and_grads(model, guide)
        theirs = pyro.param("phi").grad.item()
        torch.manual_seed(seed)
        bit = Bernoulli(logits=doubles(0.4)[0]).sample().long()
        log_prob = log_q[bit]
        (score,) = torch.autograd.grad(log_prob, phi, retain_graph=True)
        loss = score_function_loss(log_prob[None], (log_prob - log_joint[bit])[None])
        (ours,) = torch.autograd.grad(loss, phi, retain_graph=True)
        assert (ours - score).item() == pytest.approx(theirs, rel=1e-12)


def test_pyros_distributions_are_held_too(pyro):
    mean, z = doubles(0.5, 0.1).requires_grad_(), doubles(0.3, -0.7).requires_grad_()
    theirs = path_log_prob(pyro.distributions.Normal(mean, 0.8).to_event(1), z)
    ours = path_log_prob(Independent(Normal(mean, 0.8), 1), z)
    assert theirs.item() == ours.item()
    assert torch.autograd.grad(theirs, mean, allow_unused=True) == (None,)
