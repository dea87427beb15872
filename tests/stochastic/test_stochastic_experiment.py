"""The experiment on stochastic estimators: its exact gradient, and the estimators that are compared with it."""

import folders
import pytest
import torch

from experiments.stochastic import (
    ESTIMATORS,
    BitCode,
    _bias_of_straight_through,
    _estimators,
    _exact_gradient,
    _log_prob,
)
from toolkit.runner._config import load_config
from toolkit.stochastic import relaxed_bernoulli

BITS = folders.CONFIGS / "stochastic_bits.toml"


def _model(n_bits=3):
    return BitCode(n_bits, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_exact_bound_is_the_mean_over_all_codes():
    model, generator = _model(), torch.Generator().manual_seed(1)
    pixels = (torch.rand(5, 64, generator=generator) > 0.7).double()
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    expected = torch.zeros(5, dtype=torch.float64)
    for code in range(8):
        bits = torch.tensor([code >> i & 1 for i in range(3)]).double().expand(5, 3)
        expected += _log_prob(bits, logits).exp() * model.cost(bits, logits, pixels)
    torch.testing.assert_close(model.negative_bound(logits, pixels), expected)


def _decided():
    """A model whose pictures differ much between codes, and two images."""
    model, generator = _model(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.decoder.weight.mul_(10)
    return model, (torch.rand(2, 64, generator=generator) > 0.7).double()


def test_of_the_estimators_only_straight_through_is_biased():
    """The mean of 4,000 estimates, within six standard errors; the bias is the one that enumeration finds."""
    model, pixels = _decided()
    logits = model.encoder(pixels).detach()
    exact = _exact_gradient(model, logits, pixels)
    repeated = logits.expand(4000, 2, 3).clone().requires_grad_()
    draw = relaxed_bernoulli(repeated.expand(2, 4000, 2, 3), generator=torch.Generator().manual_seed(3))
    for name, estimator in ESTIMATORS.items():
        loss = 4000 * estimator(model, draw, repeated, pixels)
        (gradients,) = torch.autograd.grad(loss, repeated, retain_graph=True)
        bias, error = (gradients.mean(0) - exact).norm(), (gradients.var(0).sum() / 4000).sqrt()
        expected = _bias_of_straight_through(model, pixels) * exact.norm() if name == "straight-through" else 0
        assert abs(bias - expected) < 6 * error
    assert _bias_of_straight_through(model, pixels) > 0.1


def test_a_leave_one_out_baseline_lowers_the_standard_deviation():
    model, pixels = _decided()
    config = load_config(BITS, ["n_bits=3", "swept_samples=[2, 8]", "repeats=500"]).config
    found = _estimators(model, pixels, config, seed=0)
    alone, with_baseline = (
        found[f"relative standard deviation, {name}"] for name in ("score function", "leave-one-out baseline")
    )
    assert with_baseline[0] < 0.5 * alone[0]
    assert alone[1] == pytest.approx(alone[0] / 2, rel=0.2)


@pytest.mark.parametrize("task", ["bandit", "bits", "importance"])
def test_the_same_seed_makes_the_same_run(task):
    loaded = load_config(folders.CONFIGS / f"stochastic_{task}.toml")
    losses = []
    for _ in range(2):
        run = loaded.module.run(loaded.config, 3)
        for step in range(2):
            run.optimizer.zero_grad()
            loss = run.loss()
            loss.backward()
            run.optimizer.step()
            run.after_step(step + 1)
        losses.append(loss.item())
    assert losses[0] == losses[1]
