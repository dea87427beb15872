"""Random layers of spiking neurons beside snntorch, with gradients by currents, decay and start."""

import warnings
from functools import partial

import pytest
import torch
from values import seeded

from toolkit.quantization import arctan_slope, fast_sigmoid_slope, leaky_integrate_and_fire, sigmoid_slope


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_those_of_snntorch(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        snn = pytest.importorskip("snntorch")
        from snntorch import surrogate
    generator = seeded(seed)

    def real(least, most):
        return least + (most - least) * torch.rand((), generator=generator).item()

    def choice(*options):
        return options[torch.randint(len(options), (), generator=generator)]

    def leaf(*shape, size=1.0):
        return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    steps, shape = choice(1, 2, 9), choice((1,), (4,), (2, 3))
    threshold = torch.tensor(choice(1.0, 10 ** real(-2, 2))).item()  # the peer subtracts it in float32
    currents, start = leaf(steps, *shape, size=threshold * choice(0.1, 1.0, 1e3)), leaf(*shape, size=2 * threshold)
    beta = torch.tensor(choice(0.0, 1.0, real(0, 1)), dtype=torch.float64, requires_grad=True)
    reset, steepness = choice("subtract", "zero", "none"), 10 ** real(-1, 0.5)
    slope, of_theirs = choice(
        (partial(arctan_slope, alpha=steepness), surrogate.atan(alpha=steepness)),
        (partial(fast_sigmoid_slope, beta=steepness), surrogate.fast_sigmoid(slope=steepness)),
        (
            partial(sigmoid_slope, beta=steepness / threshold / 100),
            surrogate.sigmoid(slope=steepness / threshold / 100),
        ),
    )
    ours = leaky_integrate_and_fire(currents, decay=beta, threshold=threshold, reset=reset, slope=slope, start=start)
    neuron = snn.Leaky(
        beta=beta,
        threshold=torch.tensor(threshold, dtype=torch.float64),
        spike_grad=of_theirs,
        reset_mechanism=reset,
    )
    potential, found = start, []
    for current in currents:
        spikes, potential = neuron(current, potential)
        found.append((spikes, potential))
    theirs = [torch.stack(each) for each in zip(*found, strict=True)]
    theirs[0] = theirs[0].double()  # always float32
    weights = [torch.randn(ours[0].shape, generator=generator).double() for _ in range(2)]
    results = [(*each, *torch.autograd.grad(each, (currents, beta, start), weights)) for each in ([*ours], theirs)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8 * (1 + other.abs().max().item()))
