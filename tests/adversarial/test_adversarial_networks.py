"""Networks to attack and to train: their layers, where their parameters come from, and where gradients reach."""

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from accelerator import ACCELERATOR
from torch import Tensor, nn
from values import seeded

from toolkit.adversarial.networks import Normalize, mlp, preactivation_resnet18, small_cnn

DEVICES = [
    "cpu",
    pytest.param(ACCELERATOR, marks=pytest.mark.gpu),
]


NETWORKS: dict[str, tuple[Callable[..., nn.Sequential], tuple[int, ...]]] = {
    "mlp": (lambda **options: mlp(12, 5, widths=[9, 7], **options), (12,)),
    "small_cnn": (lambda **options: small_cnn(5, 2, image_size=7, widths=[4, 6], **options), (2, 7, 7)),
    "resnet": (lambda **options: preactivation_resnet18(5, 2, width=3, **options), (2, 9, 10)),
}
every_network = pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


# --- layers ----------------------------------------------------------------------------------------------------------


def _shapes_inside(model: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shape of what every convolution and linear layer makes of `x`, by name."""
    found: dict[str, tuple[int, ...]] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: found.update({name: tuple(output.shape[1:])}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("in_channels", "side", "stages"),
    [(3, 32, [32, 16, 8, 4]), (1, 28, [28, 14, 7, 4]), (1, 8, [8, 4, 2, 1]), (1, 1, [1, 1, 1, 1])],
    ids=["CIFAR-10", "MNIST", "digits", "a pixel"],
)
def test_shapes_of_the_residual_network(in_channels: int, side: int, stages: list[int]) -> None:
    model = preactivation_resnet18(7, in_channels, width=4, generator=seeded())
    found = _shapes_inside(model, torch.zeros(2, in_channels, side, side))
    expected = {"0": (4, side, side)}
    for stage, size in enumerate(stages):
        for block in (1 + 2 * stage, 2 + 2 * stage):
            shape = (4 * 2**stage, size, size)
            expected |= {f"{block}.rest.0": shape, f"{block}.rest.3": shape}
        if stage > 0:
            expected[f"{1 + 2 * stage}.shortcut"] = shape
    assert found == expected | {"13": (7,)}


def test_parameters_of_the_network_of_the_literature() -> None:
    """Counted from the figure: convolutions 3 x 3, projections 1 x 1, two numbers a normalised channel."""
    widths = [64, 128, 256, 512]
    count = 9 * 3 * 64 + 2 * 512 + (512 + 1) * 10
    for before, width in zip([64, *widths], widths, strict=False):
        count += 9 * (before * width + 3 * width**2) + 2 * (before + 3 * width)
        count += before * width if before != width else 0
    model = preactivation_resnet18(generator=seeded())
    assert sum(parameter.numel() for parameter in model.parameters()) == count == 11_172_170
    # Code that leaves out the last normalisation, of 512 channels, has this many.
    assert count - 2 * 512 == 11_171_146
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 18 + 3  # and the projections


def test_residual_network_is_the_formula() -> None:
    """Every operation written out by its definition in the paper, from the state dict alone."""
    model = preactivation_resnet18(3, 2, width=2, generator=seeded()).double()
    generator = seeded(5)
    for parameter in model.parameters():  # asymmetric values also where a network starts with ones and zeros
        nn.init.normal_(parameter, std=0.5, generator=generator)
    x = noise(3, 2, 11, 10)
    model(x)  # moves the running statistics
    model.eval()
    state = model.state_dict()

    def activated(x: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return ((x - mean) / (variance + 1e-5).sqrt() * scale + shift).clamp(min=0)

    out = F.conv2d(x, state["0.weight"], padding=1)
    for block in range(1, 9):
        stride = 2 if block in (3, 5, 7) else 1
        first = activated(out, f"{block}.first.0")
        residual = F.conv2d(first, state[f"{block}.rest.0.weight"], stride=stride, padding=1)
        residual = F.conv2d(activated(residual, f"{block}.rest.1"), state[f"{block}.rest.3.weight"], padding=1)
        out = residual + (F.conv2d(first, state[f"{block}.shortcut.weight"], stride=stride) if stride == 2 else out)
    expected = activated(out, "9").mean((2, 3)) @ state["13.weight"].T + state["13.bias"]
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("image_size", "widths", "strides", "features"),
    [(8, (32, 64), (1, 2), 64 * 16), (28, (16, 32), (2, 2), 32 * 49), (7, (4,), (3,), 4 * 9), (5, (), (), 3 * 25)],
)
def test_small_cnn_is_convolutions_and_a_linear_layer(image_size, widths, strides, features) -> None:
    model = small_cnn(6, 3, image_size=image_size, widths=widths, strides=strides, generator=seeded()).double()
    x = noise(2, 3, image_size, image_size)
    parameters, out = list(model.parameters()), x
    for stride in strides:
        weight, bias, *parameters = parameters
        out = F.conv2d(out, weight, bias, stride, padding=1).relu()
    weight, bias = parameters
    assert weight.shape == (6, features)
    torch.testing.assert_close(model(x), out.flatten(1) @ weight.T + bias, rtol=1e-12, atol=1e-12)


def test_mlp_is_its_formula() -> None:
    model = mlp(4, 3, widths=[5, 6], activation=nn.Tanh, generator=seeded()).double()
    first, a, second, b, third, c = model.parameters()
    x = noise(7, 4)
    expected = ((x @ first.T + a).tanh() @ second.T + b).tanh() @ third.T + c
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert [type(layer) for layer in mlp(4, 3, widths=[], generator=seeded())] == [nn.Linear]


@every_network
def test_activation_is_the_one_asked_for(make, shape) -> None:
    def kinds(model: nn.Module) -> list[type]:
        return [type(module) for module in model.modules() if isinstance(module, nn.ReLU | nn.SiLU)]

    plain, other = kinds(make(generator=seeded())), kinds(make(activation=nn.SiLU, generator=seeded()))
    assert len(plain) >= 2
    assert (set(plain), other) == ({nn.ReLU}, [nn.SiLU] * len(plain))


# --- where parameters come from --------------------------------------------------------------------------------------


@every_network
def test_parameters_depend_on_the_generator_alone(make, shape) -> None:
    before = torch.get_rng_state()
    first, again, other = (make(generator=seeded(seed)).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if first[name].dim() > 1]
    assert len(drawn) >= 3
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert all(value.isfinite().all() and value.device.type == "cpu" for value in first.values())


@pytest.mark.portable
@pytest.mark.parametrize("name", ["mlp", "small_cnn"])
def test_uniform_draws_are_those_of_torchs_layers(name: str) -> None:
    """The same numbers as torch's own layers draw from the global generator in the same state."""
    make, _ = NETWORKS[name]
    found = list(make(generator=seeded(11)).parameters())
    with torch.random.fork_rng([]):
        torch.manual_seed(11)
        layers = {
            "mlp": lambda: [nn.Linear(12, 9), nn.Linear(9, 7), nn.Linear(7, 5)],
            "small_cnn": lambda: [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 6, 3), nn.Linear(96, 5)],
        }[name]()
    expected = [parameter for layer in layers for parameter in layer.parameters()]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.portable
@pytest.mark.parametrize("name", ["mlp", "small_cnn"])
def test_uniform_draws_have_the_same_bits_on_every_processor(name: str) -> None:
    """Integers over 2^24 are drawn, then scaled and shifted, each with one rounding."""
    make, _ = NETWORKS[name]
    draws = seeded(11)
    for layer in make(generator=seeded(11)):
        bound = 1 / math.sqrt(layer.weight[0].numel()) if hasattr(layer, "weight") else 0.0
        for parameter in layer.parameters():
            scaled = torch.rand(parameter.shape, generator=draws) * (2 * bound)
            assert torch.equal(parameter, scaled - bound)


def test_convolutions_of_the_residual_network_keep_the_variance_of_gradients() -> None:
    model = preactivation_resnet18(width=32, generator=seeded())
    checked = 0
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight, fan_out = module.weight, module.weight.shape[0] * module.weight[0, 0].numel()
            error = 5 / math.sqrt(2 * weight.numel())  # five standard errors of a standard deviation
            assert weight.std().item() * math.sqrt(fan_out / 2) == pytest.approx(1, abs=error)
            assert weight.mean().abs() < 5 * math.sqrt(2 / fan_out / weight.numel())
            assert module.bias is None
            checked += 1
    assert checked == 20
    assert not model[-1].bias.any()
    assert model[-1].weight.abs().max() <= 1 / math.sqrt(256)


def test_normalisation_starts_as_torchs() -> None:
    for module in preactivation_resnet18(width=2, generator=seeded()).modules():
        if isinstance(module, nn.BatchNorm2d):
            expected = nn.BatchNorm2d(module.num_features).state_dict()
            assert {name: value.tolist() for name, value in module.state_dict().items()} == {
                name: value.tolist() for name, value in expected.items()
            }


# --- what they do in a training --------------------------------------------------------------------------------------


@every_network
def test_gradients_reach_every_parameter_and_the_input(make, shape) -> None:
    model = make(generator=seeded(), activation=nn.SiLU).double()
    x = noise(4, *shape).requires_grad_()
    F.cross_entropy(model(x), torch.tensor([0, 4, 2, 1])).backward()
    for name, parameter in [*model.named_parameters(), ("x", x)]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-8, name


def test_modes_of_the_residual_network() -> None:
    """Rows see each other while training, through the statistics of the batch, and not in evaluation."""
    model = preactivation_resnet18(5, 1, width=2, generator=seeded()).double()
    x = noise(6, 1, 8, 8)
    with torch.no_grad():
        together = model(x)
        assert (model(x[:3]) - together[:3]).abs().max() > 1e-3
        statistics = {name: value.clone() for name, value in model.named_buffers()}
        model.eval()
        torch.testing.assert_close(model(x[:3]), model(x)[:3], rtol=1e-12, atol=1e-12)
        assert all(torch.equal(value, statistics[name]) for name, value in model.named_buffers())
    assert all(value == 2 for name, value in statistics.items() if name.endswith("num_batches_tracked"))


@pytest.mark.parametrize("device", DEVICES)
@every_network
def test_layouts_and_devices_agree(make, shape, device) -> None:
    if len(shape) == 1:
        pytest.skip("a vector has one layout")
    model, x = make(generator=seeded()).double().eval(), noise(4, *shape)
    expected = model(x)
    model.to(device, memory_format=torch.channels_last)
    found = model(x.to(device, memory_format=torch.channels_last))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_network
def test_half_precision_is_near(make, shape, dtype) -> None:
    model, x = make(generator=seeded()).eval(), noise(4, *shape).float()
    expected = model(x)
    found = model.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


# The residual network's last two blocks and its head: each kind of layer, compiled in a third of the time.
COMPILED = {**NETWORKS, "resnet's last stage": (lambda **options: NETWORKS["resnet"][0](**options)[7:], (12, 9, 10))}


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@pytest.mark.parametrize(
    ("network", "backend"),
    [
        ("small_cnn", "aot_eager"),
        ("resnet", "eager"),
        pytest.param("resnet's last stage", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_in_one_graph(network, backend) -> None:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    make, shape = COMPILED[network]
    model = make(generator=seeded()).double()
    x, labels = noise(4, *shape), torch.tensor([0, 4, 2, 1])

    def gradients(network: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(network(x), labels), list(model.parameters()))

    expected = gradients(model)
    # Torch keeps graphs for later processes, without the instruction set (ATEN_CPU_CAPABILITY) that they were written
    # for: compiled for another, they overflow the stack.
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        found = gradients(torch.compile(model, backend=backend, fullgraph=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "argument", ["n_classes", "in_channels", "image_size", "widths", "strides", "width", "n_features"]
)
def test_sizes_are_positive(argument: str) -> None:
    makers: dict[Callable[..., nn.Module], dict[str, object]] = {
        mlp: {"n_features": 3, "n_classes": 2, "widths": [4]},
        small_cnn: {"n_classes": 2, "in_channels": 1, "image_size": 4, "widths": [4], "strides": [1]},
        preactivation_resnet18: {"n_classes": 2, "in_channels": 3, "width": 2},
    }
    tried = 0
    for make, sizes in makers.items():
        if argument in sizes:
            bad = [0] if argument in ("widths", "strides") else 0
            with pytest.raises(ValueError, match=re.escape(f"`{argument}` should be a positive integer. Found 0.")):
                make(**{**sizes, argument: bad}, generator=seeded())
            tried += 1
    assert tried


def test_strides_belong_to_widths() -> None:
    with pytest.raises(ValueError, match=r"`strides` should be 3, one for each of `widths`\. Found 2\."):
        small_cnn(10, image_size=8, widths=[2, 2, 2], generator=seeded())


# --- normalisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)], ids=str)
def test_every_channel_is_scaled_by_its_own(shape: tuple[int, ...]) -> None:
    mean, std = [0.5, -1.0, 3.0], [2.0, 0.25, 4.0]
    x = noise(*shape)
    found = Normalize(mean, std).double()(x)
    for channel in range(3):
        assert torch.equal(found[:, channel], (x[:, channel] - mean[channel]) / std[channel])


def test_one_number_scales_all() -> None:
    x = noise(4, 5)
    assert torch.equal(Normalize(0.5, 0.25).double()(x), (x - 0.5) * 4)


def test_constants_are_buffers() -> None:
    module = Normalize([0.5, 1.0], [2.0, 4.0])
    assert list(module.parameters()) == []
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {"mean": [0.5, 1], "std": [2, 4]}
    assert module.to(torch.float16)(torch.zeros(1, 2, dtype=torch.float16)).dtype == torch.float16
    assert repr(module) == "Normalize(mean=[0.5, 1.0], std=[2.0, 4.0])"
    with torch.device("meta"):  # as a network is made whose values come later; these do not
        assert Normalize(0.5, 2.0).mean.tolist() == [0.5]


def test_gradient_of_pixels_goes_through_the_scaling() -> None:
    x = noise(2, 2, 3).requires_grad_()
    (Normalize([0.5, 1.0], [2.0, 4.0]).double()(x) * torch.arange(1.0, 4.0)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (torch.arange(1.0, 4.0) / torch.tensor([[2.0], [4.0]])).double().expand(2, 2, 3))


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0, 0.0], [1.0], "`mean` and `std` should have one number for each channel. Found 2 and 1."),
        ([], [], "`mean` and `std` should have one number for each channel. Found 0 and 0."),
        ([0.0], [0.0], "`std` should be positive and finite. Found [0.0]."),
        ([0.0], [math.inf], "`std` should be positive and finite. Found [inf]."),
        ([math.nan], [1.0], "`mean` should be finite. Found [nan]."),
    ],
)
def test_constants_are_checked(mean, std, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Normalize(mean, std)


@pytest.mark.parametrize("shape", [(4, 2, 8, 8), (3,), (4, 1)], ids=str)
def test_other_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`x` should have shape (N, 3, ...). Found {shape}.")):
        Normalize([0, 0, 0], [1, 1, 1])(torch.zeros(shape))
