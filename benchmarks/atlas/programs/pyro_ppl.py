"""pyro-ppl 1.9.2: bounds of variational inference, with and without reparameterization."""

import pyro
import torch
from pyro.distributions import Categorical, Normal, constraints
from pyro.infer import (
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    config_enumerate,
)

from benchmarks.atlas.caught import caught


def _normal(data):
    mean = pyro.sample("mean", Normal(0.0, 2.0))
    with pyro.plate("data", len(data)):
        pyro.sample("x", Normal(mean, 1.0), obs=data)


def _posterior():
    scale = pyro.param("scale", torch.tensor(0.5), constraint=constraints.positive)
    return Normal(pyro.param("loc", torch.tensor(0.1)), scale)


def _reparameterized(data):
    pyro.sample("mean", _posterior())


def _score_function(data):
    infer = {"baseline": {"use_decaying_avg_baseline": True}}
    pyro.sample("mean", _posterior().has_rsample_(False), infer=infer)


def _mixture(data):
    weights = pyro.param("weights", torch.ones(2) / 2, constraint=constraints.simplex)
    means = pyro.param("means", torch.tensor([-1.0, 1.0]))
    with pyro.plate("data", len(data)):
        component = pyro.sample("component", Categorical(weights))
        pyro.sample("x", Normal(means[component], 1.0), obs=data)


def _components(data):
    shares = pyro.param("shares", torch.ones(len(data), 2) / 2, constraint=constraints.simplex)
    with pyro.plate("data", len(data)):
        pyro.sample("component", Categorical(shares))


def _bound(objective, model, guide):
    pyro.clear_param_store()
    data = torch.randn(20) + 1
    if hasattr(objective, "differentiable_loss"):
        loss = lambda: objective.differentiable_loss(model, guide, data)  # noqa: E731
    else:
        loss = caught(lambda: objective.loss_and_grads(model, guide, data))
    loss()
    return loss, dict(pyro.get_param_store().named_parameters())


def reparameterized():
    return _bound(Trace_ELBO(num_particles=3), _normal, _reparameterized)


def mean_field():
    return _bound(TraceMeanField_ELBO(), _normal, _reparameterized)


def score_function():
    return _bound(Trace_ELBO(num_particles=3), _normal, _score_function)


def score_function_with_a_baseline():
    return _bound(TraceGraph_ELBO(), _normal, _score_function)


def score_function_of_a_mixture():
    return _bound(TraceGraph_ELBO(), _mixture, _components)


def enumerated():
    return _bound(TraceEnum_ELBO(), _mixture, config_enumerate(_components))


def renyi():
    return _bound(RenyiELBO(num_particles=3), _normal, _reparameterized)


def wake_sleep():
    return _bound(ReweightedWakeSleep(num_particles=3), _normal, _reparameterized)
