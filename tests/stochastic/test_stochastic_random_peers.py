"""Stochastic estimators of random Gaussian models beside Pyro's, with the same noise."""

import math
import warnings

import pytest
import torch
from torch.distributions import Independent, Normal
from values import seeded

from toolkit import stochastic, unblock
from toolkit.stochastic import (
    iwae_bound,
    iwae_loss,
    path_log_prob,
    score_function_loss,
    wake_loss,
    wake_proposal_loss,
)


@pytest.fixture(scope="module")
def pyro():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("pyro")
    yield found
    found.clear_param_store()


class Problem:
    """A latent vector z of D numbers and C observations, K samples, and the same for Pyro with the same noise."""

    def __init__(self, pyro, seed):
        generator = seeded(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def integer(most):
            return int(torch.randint(1, most, (), generator=generator))

        d, c, self.k = integer(4), integer(4), 1 + integer(7)
        self.matrix, self.noise = draw(c, d), draw(self.k, d)
        self.observed = draw(c) * 10 ** draw().clamp(-1, 1.5)
        self.scale = (0.5 * draw()).exp()
        self.values = {"prior": draw(d), "mean": draw(d), "log_scale": 0.7 * draw(d), "baseline": draw()}
        self.pyro = pyro

    def ours(self, *, reparameterised):
        """Return the leaves, the samples, the proposal, its log-densities (K,), and those of model and data."""
        p = {name: value.clone().requires_grad_() for name, value in self.values.items()}
        z = p["mean"] + p["log_scale"].exp() * self.noise
        z = z if reparameterised else z.detach()
        q = Independent(Normal(p["mean"], p["log_scale"].exp()), 1)
        prior = Independent(Normal(p["prior"], torch.ones_like(p["prior"])), 1)
        data = Independent(Normal(z @ self.matrix.T, self.scale), 1)
        return p, z, q, q.log_prob(z), prior.log_prob(z) + data.log_prob(self.observed)

    def theirs(self, bound, *, reparameterised, baseline=False):
        """Return their value and gradients by name, None for those that a loss does not reach."""
        pyro, dist, noise = self.pyro, self.pyro.distributions, iter(self.noise)

        class Replayed(dist.Normal):
            has_rsample = reparameterised

            def rsample(self, sample_shape=()):
                return self.loc + self.scale * next(noise)

            def sample(self, sample_shape=()):
                return self.rsample().detach()

        def model():
            prior = pyro.param("prior", self.values["prior"].clone())
            z = pyro.sample("z", dist.Normal(prior, torch.ones_like(prior)).to_event(1))
            pyro.sample("x", dist.Normal(self.matrix @ z, self.scale).to_event(1), obs=self.observed)

        def guide():
            mean, log_scale = (pyro.param(name, self.values[name].clone()) for name in ("mean", "log_scale"))
            infer = {"baseline": {"baseline_value": pyro.param("baseline", self.values["baseline"].clone())}}
            q = Replayed(mean, log_scale.exp()).to_event(1)
            pyro.sample("z", q, infer=infer if baseline else {})

        pyro.clear_param_store()
        value = bound.loss_and_grads(model, guide)
        return value, {name: pyro.param(name).grad for name in pyro.get_param_store()}


def assert_same(ours, theirs, value, parameters, gradients):
    assert ours.item() == pytest.approx(theirs, rel=1e-9)
    for name, expected in gradients.items():
        (found,) = torch.autograd.grad(
            value, parameters[name], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        expected = torch.zeros_like(found) if expected is None else expected
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10 * (1 + expected.abs().max().item()))


SEEDS = pytest.mark.parametrize("seed", range(12))


@SEEDS
def test_renyis_bound_of_order_zero(pyro, seed):
    problem = Problem(pyro, seed)
    p, _, _, log_q, log_joint = problem.ours(reparameterised=True)
    bound = pyro.infer.RenyiELBO(alpha=0, num_particles=problem.k)
    theirs, gradients = problem.theirs(bound, reparameterised=True)
    assert_same(-iwae_bound(log_joint - log_q), theirs, iwae_loss(log_joint - log_q), p, gradients)


@SEEDS
def test_the_evidence_lower_bound_along_the_path(pyro, seed):
    problem = Problem(pyro, seed)
    p, z, q, _, log_joint = problem.ours(reparameterised=True)
    theirs, gradients = problem.theirs(pyro.infer.Trace_ELBO(num_particles=problem.k), reparameterised=True)
    with unblock(stochastic.DENSITY_PARAMETERS):
        loss = (path_log_prob(q, z) - log_joint).mean()
    assert_same(loss, theirs, loss, p, gradients)


@SEEDS
def test_the_evidence_lower_bound_by_scores(pyro, seed):
    """Pyro leaves out the score of mean zero in the cost's own gradient, as `path_log_prob` does."""
    problem = Problem(pyro, seed)
    p, z, q, log_q, log_joint = problem.ours(reparameterised=False)
    theirs, gradients = problem.theirs(pyro.infer.Trace_ELBO(num_particles=problem.k), reparameterised=False)
    cost = path_log_prob(q, z) - log_joint
    assert_same(cost.mean(), theirs, score_function_loss(log_q, cost), p, gradients)


@SEEDS
def test_the_evidence_lower_bound_by_scores_with_a_learned_baseline(pyro, seed):
    problem = Problem(pyro, seed)
    p, z, q, log_q, log_joint = problem.ours(reparameterised=False)
    bound = pyro.infer.TraceGraph_ELBO(num_particles=problem.k)
    theirs, gradients = problem.theirs(bound, reparameterised=False, baseline=True)
    cost = path_log_prob(q, z) - log_joint
    of_baseline = (p["baseline"] + cost.detach()).square().mean()  # theirs raises a bound, ours lowers a cost
    loss = score_function_loss(log_q, cost, baseline=-p["baseline"]) + of_baseline
    assert_same(cost.mean(), theirs, loss, p, gradients)


@SEEDS
def test_reweighted_wake_sleep(pyro, seed):
    problem = Problem(pyro, seed)
    p, z, q, log_q, log_joint = problem.ours(reparameterised=False)
    bound = pyro.infer.ReweightedWakeSleep(num_particles=problem.k, insomnia=1.0, vectorize_particles=False)
    (of_model, of_proposal), gradients = problem.theirs(bound, reparameterised=False)
    log_weights = log_joint - log_q
    assert -iwae_bound(log_weights).item() == pytest.approx(of_model, rel=1e-9)
    proposal_loss = wake_proposal_loss(log_weights, q, z)
    assert_same(proposal_loss, of_proposal, proposal_loss + wake_loss(log_weights.detach(), log_joint), p, gradients)
    assert math.isfinite(of_model)
