"""Audits of published packages, as they are: what their own stops do, by closed forms and by the packages' claims.

None of them is needed otherwise. Tried: vector-quantize-pytorch 1.32.0, pytorch-metric-learning 2.9.0, torchrl 0.14.1
with tensordict 0.15.3, pyro-ppl 1.9.2, torchdiffeq 0.2.5; a test whose package is missing is skipped.
"""

import pytest
import torch
from torch import nn

from toolkit.gradients import audit


@pytest.fixture(autouse=True)
def _double():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(default)


def _in(found, file):
    """Return line:column -> effect of the places in one file."""
    return {effect.site.partition(":")[2]: effect for effect in found.effects if effect.site.startswith(f"{file}:")}


def _is_bitwise_plain(found, loss, parameters):
    plain = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    return all(
        torch.equal(found.blocked[name], torch.zeros_like(parameter) if gradient is None else gradient)
        for (name, parameter), gradient in zip(parameters.items(), plain, strict=True)
    )


# --- vector quantization -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_vector_quantizer_passes_its_gradient_by_detach_alone():
    quantizers = pytest.importorskip("vector_quantize_pytorch")
    encoder, decoder = nn.Linear(5, 8), nn.Linear(8, 5)
    quantize = quantizers.VectorQuantize(dim=8, codebook_size=16, commitment_weight=0.0, rotation_trick=False).double()
    x = torch.randn(2, 10, 5)

    def loss():
        quantized, _, _ = quantize(encoder(x))
        return (decoder(quantized) - x).square().mean()

    state = {name: value.clone() for name, value in quantize.state_dict().items()}
    parameters = {**dict(encoder.named_parameters("encoder")), **dict(decoder.named_parameters("decoder"))}
    found = audit(loss, parameters)
    assert found.valid, found.reason
    for name, value in quantize.state_dict().items():
        assert torch.equal(value, state[name]), f"{name}: the codebook learns by averages, and not from an audit"
    # Straight through, z + stop(q - z): opened, z is taken away again, and the encoder does not hear the decoder.
    silent = [effect for effect in found.effects if effect.per_parameter["encoder.weight"].ratio < 1e-12]
    assert len(silent) == 1
    assert all(silent[0].per_parameter[f"decoder.{name}"].leak == 0 for name in ("weight", "bias"))
    others = [effect for effect in found.effects if effect is not silent[0]]
    assert others
    assert {effect.verdict.kind for effect in others} <= {"redundant", "no-op"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scalar_quantizer_without_its_detach_has_no_gradient_at_all():
    quantizers = pytest.importorskip("vector_quantize_pytorch")
    encoder = nn.Linear(5, 3)
    quantize = quantizers.FSQ(levels=[3, 5, 5]).double()
    x, weights = torch.randn(2, 10, 5), torch.randn(3)
    found = audit(lambda: (quantize(encoder(x))[0] * weights).sum(), encoder)
    assert found.valid, found.reason
    (effect,) = found.effects
    assert found.kinds[effect.name] == "detach()"
    assert effect.ratio < 1e-12  # rounding is flat


# --- metric learning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
def test_the_maximum_that_a_contrastive_loss_subtracts_is_redundant(name):
    """A log-sum-exp does not depend on its shift: the packages stop it, and may."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    net, x, labels = nn.Linear(5, 6), torch.randn(8, 5), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    contrastive = getattr(losses, name)()

    def loss():
        return contrastive(net(x), labels)

    found = audit(loss, net)
    assert found.valid, found.reason
    assert _is_bitwise_plain(found, loss, dict(net.named_parameters()))
    (effect,) = found.effects
    assert found.kinds[effect.name] == "detach()"
    assert effect.verdict.kind == "redundant"


def test_a_memory_of_past_batches_is_filled_by_no_audit():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    net, x, labels = nn.Linear(5, 6), torch.randn(8, 5), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    remembering = losses.CrossBatchMemory(losses.NTXentLoss(), 6, memory_size=16)

    def loss():
        return remembering(net(x), labels)

    loss()
    memory = remembering.embedding_memory.clone()
    found = audit(loss, net)
    assert found.valid, found.reason
    assert remembering.queue_idx == 8
    assert torch.equal(remembering.embedding_memory, memory)
    assert _is_bitwise_plain(found, loss, dict(net.named_parameters()))


# --- probabilistic programs and differential equations -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_baseline_in_the_parameter_store_of_pyro_is_put_back():
    pyro = pytest.importorskip("pyro")
    from pyro.distributions import Normal
    from pyro.infer import TraceGraph_ELBO

    pyro.clear_param_store()
    data = torch.randn(20) + 1

    def model():
        mean = pyro.sample("mean", Normal(0.0, 2.0))
        with pyro.plate("data", len(data)):
            pyro.sample("x", Normal(mean, 1.0), obs=data)

    def guide():
        where = Normal(pyro.param("loc", torch.tensor(0.1)), 0.5).has_rsample_(False)
        pyro.sample("mean", where, infer={"baseline": {"use_decaying_avg_baseline": True}})

    class Caught(Exception):
        """Holds the loss that was to be differentiated."""

    def catch(self, *args, **kwargs):
        raise Caught(self)

    def loss():  # the estimator differentiates it by itself
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "backward", catch)
            with pytest.raises(Caught) as caught:
                TraceGraph_ELBO().loss_and_grads(model, guide)
        return caught.value.args[0]

    loss()
    found = audit(loss, {"loc": pyro.param("loc")})
    assert found.valid, found.reason
    assert any("state in the globals of a package" in remark for remark in found.remarks)
    (score,) = [found[place] for place, kind in found.kinds.items() if kind == "detach()"]
    assert score.verdict.kind == "partial"


def test_the_adjoint_of_a_differential_equation_is_not_blamed():
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, t, y):
            return self.linear(y).tanh()

    flow, y0, times = Flow(), torch.randn(4, 2), torch.tensor([0.0, 1.0])
    found = audit(lambda: torchdiffeq.odeint_adjoint(flow, y0, times)[-1].square().mean(), flow)
    assert found.valid, found.reason
    assert {effect.verdict.kind for effect in found.effects} == {"no-op"}
    assert not found.unopened


# --- reinforcement learning --------------------------------------------------------------------------------------


def _transitions(tensordict):
    return tensordict.TensorDict(
        {
            "observation": torch.randn(6, 4),
            "action": torch.eye(3)[torch.randint(3, (6,))],
            "next": {
                "observation": torch.randn(6, 4),
                "reward": torch.randn(6, 1),
                "done": torch.zeros(6, 1, dtype=torch.bool),
                "terminated": torch.zeros(6, 1, dtype=torch.bool),
            },
        },
        [6],
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("delayed", [False, True], ids=["one network", "a target network"])
def test_the_target_of_q_learning(delayed):
    """With r + g max Q' held constant, -d (w) phi; opened, the residual gradient of Baird, 1995: - d (phi - g phi')."""
    torchrl = pytest.importorskip("torchrl.objectives")
    tensordict = pytest.importorskip("tensordict")
    from torchrl.data import OneHot
    from torchrl.modules import QValueActor

    net = nn.Linear(4, 3)
    actor = QValueActor(net, in_keys=["observation"], spec=OneHot(3))
    objective = torchrl.DQNLoss(actor, action_space=OneHot(3), delay_value=delayed, loss_function="l2")
    objective.make_value_estimator(torchrl.ValueEstimators.TD0, gamma=0.9)
    batch = _transitions(tensordict)
    parameters = {"weight": net.weight, "bias": net.bias}

    def loss():
        return objective(batch.clone())["loss"]

    def written_out(target_is_open):
        chosen = (net(batch["observation"]) * batch["action"]).sum(1)
        best = net(batch["next", "observation"]).amax(1)
        target = batch["next", "reward"].squeeze(1) + 0.9 * (best if target_is_open else best.detach())
        return torch.autograd.grad((chosen - target).square().mean(), list(parameters.values()))

    found = audit(loss, parameters)
    assert found.valid, found.reason
    for gradient, expected in zip(found.blocked.values(), written_out(False), strict=True):
        torch.testing.assert_close(gradient, expected)
    opened = found.gradient([effect.name for effect in found.effects])
    for gradient, expected in zip(opened.values(), written_out(not delayed), strict=True):
        torch.testing.assert_close(gradient, expected)
