"""Models and data as users have them: the right answer, or a sentence that says what to do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from toolkit import adversarial as adv
from toolkit import unblock
from toolkit.adversarial import _functional

N, D, C = 12, 6, 3
KEEP_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Checkpointed(nn.Module):
    """A model that computes its activations again in the backward pass, in the mode and with the weights of then."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.zeroth = nn.Linear(D, D).double()
            self.first = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Tanh()).double()
            self.last = nn.Linear(5, C).double()
        self.kind = kind

    def forward(self, x):
        x = self.zeroth(x)
        if self.kind == "plain":
            return self.last(self.first(x))
        if self.kind == "nested":
            once = partial(checkpoint, self.first, use_reentrant=False)
            return self.last(checkpoint(once, x, use_reentrant=False))
        if self.kind == "selective":
            return self.last(checkpoint(self.first, x, use_reentrant=False, context_fn=KEEP_PRODUCTS))
        if self.kind == "in pieces":
            return self.last(checkpoint_sequential(self.first, 2, x, use_reentrant=False))
        return self.last(checkpoint(self.first, x, use_reentrant=self.kind == "reentrant"))


class Picked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = adv.mlp(D, C, widths=[5], generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return self.inner(x), x


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, D, generator=generator, dtype=torch.float64)
    return x, torch.arange(N) % C


def gradients(loss, model):
    return torch.autograd.grad(loss(model), list(model.parameters()))


def opened(model):
    x, labels = data()
    with unblock(adv.EXAMPLE):
        return adv.adversarial_loss(model, x, labels, attack=partial(adv.pgd, epsilon=0.3, norm="l2", steps=2))


def perturbed(model):
    x, labels = data()
    return adv.awp_loss(model, lambda model: F.cross_entropy(model(x), labels), gamma=0.5)


def linear_region(model):
    x, labels = data()
    return adv.llr_loss(model, x, labels, attack=partial(adv.pgd, epsilon=0.1))


@pytest.mark.parametrize("kind", ["checkpoints", "nested", "selective", "in pieces"])
@pytest.mark.parametrize("loss", [perturbed, opened, linear_region])
def test_checkpoints_of_activations_do_not_change_a_gradient(loss, kind):
    """They would be computed again with the weights, and in the modes, that the model has outside of the loss."""
    expected, found = (gradients(loss, Checkpointed(kind).train()) for kind in ("plain", kind))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_in_another_dtype_of_a_model_with_checkpoints():
    x, labels = data()
    attack = partial(adv.pgd, x=x, labels=labels, epsilon=0.1, steps=3, gradient_dtype=torch.float32)
    assert torch.equal(*(attack(Checkpointed(kind).eval()) for kind in ("plain", "checkpoints")))


@pytest.mark.parametrize("name", ["CheckpointFunction", "_checkpoint_hook"])
def test_a_release_of_torch_whose_checkpoints_are_made_in_another_way_is_refused(monkeypatch, name):
    _functional._check_release()
    monkeypatch.setitem(_functional._INSTEAD, name, _functional._ORIGINALS[name])
    _functional._check_release.cache_clear()
    with pytest.raises(RuntimeError, match="install an older one"):
        perturbed(Checkpointed("checkpoints"))
    with pytest.raises(RuntimeError, match="install an older one"):
        linear_region(Checkpointed("reentrant"))


def test_checkpoints_work_again_afterwards():
    x, labels = data()
    with pytest.raises(ValueError, match="labels"):
        adv.pgd(Checkpointed("checkpoints"), x, labels + C, epsilon=0.1, gradient_dtype=torch.float32)
    calls = []
    point = x.clone().requires_grad_()
    checkpoint(lambda x: calls.append(0) or x.sin(), point, use_reentrant=False).sum().backward()
    assert len(calls) == 2


def virtual(model):
    return adv.vat_loss(model, data()[0], epsilon=0.1)


def adversarial(model):
    x, labels = data()
    return adv.adversarial_loss(model, x, labels, attack=partial(adv.ensemble, epsilon=0.1))


def curved(model):
    x, labels = data()
    return adv.cure_loss(model, x, labels, h=0.1, weight=1.0)


@pytest.mark.parametrize("loss", [perturbed, opened, linear_region, virtual, adversarial, curved])
def test_a_checkpoint_that_no_gradient_of_inputs_passes(loss):
    """``use_reentrant=True``, which torch refuses in `torch.autograd.grad`."""
    found = []
    for kind in ("plain", "reentrant"):
        model = Checkpointed(kind).eval()
        value = loss(model)
        value.backward()
        found.append([value, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.jit.trace(model, torch.rand(2, D))])
def test_wrapped_models_are_refused_in_another_dtype(wrap):
    model, (x, labels) = wrap(adv.mlp(D, C, widths=[5], generator=torch.Generator().manual_seed(0))), data()
    with pytest.raises(TypeError, match="give the module inside"):
        adv.pgd(model, x.float(), labels, epsilon=0.1, gradient_dtype=torch.bfloat16)
    assert adv.pgd(model, x.float(), labels, epsilon=0.1).isfinite().all()


def test_a_tuple_is_no_logits_in_another_dtype_either():
    x, labels = data()
    with pytest.raises(TypeError, match="`logits=0`"):
        adv.pgd(Picked(), x.float(), labels, epsilon=0.1, gradient_dtype=torch.bfloat16)


def trained(model, **changes):
    x, labels = data()
    settings = {"method": "pgd", "epsilon": 0.1, "epochs": 1, "generator": torch.Generator().manual_seed(0)} | changes
    return adv.train(model, settings.pop("data", x), settings.pop("labels", labels), **settings)


class Frozen(Picked):
    @torch.no_grad()
    def forward(self, x):
        return self.inner(x)


REFUSED = {
    "tuple, standard": (Picked, {"method": "standard"}, TypeError, "train a module that returns the logits alone"),
    "tuple, pgd": (Picked, {}, TypeError, "train a module that returns the logits alone"),
    "no gradient": (Frozen, {"method": "standard"}, RuntimeError, "is its forward pass in `torch.no_grad"),
    "half, Adam": (lambda: nn.Linear(D, C).half(), {}, ValueError, "train in float32 or bfloat16"),
    "no model": (lambda: "model", {}, TypeError, r"should be a torch\.nn\.Module\. Found str"),
    "one-hot": (lambda: nn.Linear(D, C), {"labels": F.one_hot(data()[1])}, ValueError, r"`labels\.argmax\(1\)`"),
    "Boolean": (lambda: nn.Linear(D, C), {"labels": data()[1] > 0}, TypeError, r"integers\. Found torch\.bool"),
    "radii": (lambda: nn.Linear(D, C), {"epsilon": torch.full((N,), 0.1)}, TypeError, r"one radius .* Tensor of 12\."),
    "scale": (lambda: nn.Linear(D, C), {"data": 255 * data()[0]}, ValueError, "`x / 255`"),
}


@pytest.mark.parametrize(("model", "changes", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused(model, changes, error, words):
    with pytest.raises(error, match=words):
        trained(model(), **changes)


def test_half_precision_is_trained_where_nothing_underflows():
    for changes in ({"optimizer": "sgd"}, {"optimizer": partial(torch.optim.Adam, eps=1e-4)}):
        assert trained(nn.Linear(D, C).half(), **changes).losses[0] < 5
    assert trained(nn.Linear(D, C).bfloat16()).losses[0] < 5


def test_free_training_of_a_model_that_writes_into_its_input():
    losses = []
    for inplace in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(D, C))
        losses.append(trained(model, method="free", epochs=2).losses)
    assert losses[0] == losses[1]


DATA = {
    "one-hot": ({"labels": F.one_hot(data()[1])}, ValueError, r"`labels\.argmax\(1\)`"),
    "bytes": ({"x": (255 * data()[0]).to(torch.uint8)}, TypeError, "`x / 255`"),
    "pixels to 255": ({"x": 255 * data()[0]}, ValueError, "`x / 255`"),
    "sparse": ({"x": data()[0].to_sparse()}, TypeError, "`x` should be a dense tensor"),
    "fewer labels": ({"labels": data()[1][:3]}, ValueError, r"`labels` should have shape \(12,\)"),
    "one number": ({"x": torch.tensor(0.1)}, ValueError, r"`x` should have shape \(N, ...\)"),
    "list": ({"labels": data()[1].tolist()}, TypeError, "`labels` should be a tensor of integers"),
}


@pytest.mark.parametrize("attack", [adv.pgd, adv.robust_accuracy, adv.robustness_curve], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("changes", "error", "words"), DATA.values(), ids=DATA)
def test_other_data_are_refused(attack, changes, error, words):
    x, labels = data()
    radius = {"epsilons": [0.1]} if attack is adv.robustness_curve else {"epsilon": 0.1}
    with pytest.raises(error, match=words):
        attack(nn.Linear(D, C).double(), **{"x": x, "labels": labels} | changes, **radius)
