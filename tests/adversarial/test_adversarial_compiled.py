"""Attacks on models compiled by `torch.compile`, which give their buffers away in the first backward pass."""

from functools import partial

import pytest
import torch

from toolkit import adversarial as adv

ATTACKS = {
    "pgd": partial(adv.pgd, epsilon=0.05),
    "apgd": partial(adv.apgd, epsilon=0.05),
    "linearised": partial(adv.linearised, epsilon=0.05),
    "multi_target": partial(adv.multi_target, epsilon=0.05),
    "deepfool": adv.deepfool,
    "fab": adv.fab,
    "ddn": adv.ddn,
    "carlini_wagner": partial(adv.carlini_wagner, steps=20, searches=2),
    "ensemble": partial(adv.ensemble, epsilon=0.05),
}


@pytest.fixture(scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def models(request):
    """Return a model and itself compiled, once for all attacks."""
    from torch._dynamo import config as dynamo_config

    model = adv.mlp(16, 10, widths=[12], generator=torch.Generator().manual_seed(0)).double().eval()
    model[1] = torch.nn.GELU()  # its backward pass saves buffers
    torch.compiler.reset()
    with dynamo_config.patch(fail_on_recompile_limit_hit=True):  # in place of running what was to be compiled
        yield model, torch.compile(model, backend=request.param)


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_compiled_model_is_attacked_like_the_model_itself(attack, models):
    model, compiled = models
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = model(x).argmax(1)
    found = attack(compiled, x, labels)
    # Inductor rounds in another order, and a walk along a boundary ends a little beside.
    torch.testing.assert_close((found - x).norm(dim=1), (attack(model, x, labels) - x).norm(dim=1), rtol=0.01, atol=0)
    torch.testing.assert_close(model(found).argmax(1) != labels, model(attack(model, x, labels)).argmax(1) != labels)
