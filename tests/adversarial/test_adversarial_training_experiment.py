"""The experiments on methods of adversarial training: seeded, with targets found without blocks, and their findings."""

import json
import struct
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from contract import finite_differences, relative_error
from folders import CONFIGS
from sklearn.datasets import load_digits
from torch import Tensor

from experiments.adversarial_training import Config, _data, _network, _scores, run
from toolkit import unblock
from toolkit.adversarial import (
    CLEAN_DISTRIBUTION,
    CURVATURE_DIRECTION,
    EXAMPLE,
    VIRTUAL_CLEAN,
    VIRTUAL_DIRECTION,
    WEIGHT_PERTURBATION,
    fgsm,
    mlp,
    multi_target,
    pgd,
)
from toolkit.adversarial.training.methods import AWP, METHODS, PGD
from toolkit.adversarial.training.trades import nearby_pgd
from toolkit.adversarial.training.vat import virtual_example
from toolkit.adversarial.training.weights import weight_perturbation
from toolkit.runner._command import main
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._training import train, train_methods

FOLDER = CONFIGS
CONFIGS = sorted(
    path.stem
    for path in FOLDER.glob("adversarial_*.toml")
    if tomllib.loads(path.read_text())["experiment"] == "adversarial_training"
)
OWN = {name: FOLDER / "own_data" / f"adversarial_{name}.toml" for name in ("mnist", "cifar10")}
SMALL = {"data": "digits", "network": "mlp", "widths": [8], "epsilon": 0.2, "dtype": "float64", "batch_size": 50}


def config(name: str = "adversarial_trades", **changes: object) -> Config:
    """Return a config without the other methods, in float64: a seed then trains the same model on every machine."""
    values = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    return Config(**(values | {"methods": [], "ensemble": [], "dtype": "float64"} | changes))


def small(method: str, **changes: object) -> Config:
    settings = {} if method in ("standard", "fgsm", "rs_fgsm", "vat", "cure", "awp") else {"steps": 3}
    return config(**(SMALL | {"trained": {"name": "x", "method": method, "settings": settings}, "steps": 3} | changes))


def gradient(loss: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


# --- a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_runs_of_a_seed_are_the_same_and_leave_the_global_generator_alone(name: str) -> None:
    settings = config(name, steps=3, evaluate_every=3)
    state = torch.get_rng_state()
    first, second = (train(run(settings, seed=1), settings).to_dict() for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert first["first_loss"] != train(run(settings, seed=2), settings).first_loss


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "free"])
def test_the_blocked_gradient_is_the_target_in_every_update(method: str, norm: str) -> None:
    settings = small(method, norm=norm, epsilon={"linf": 0.2, "l2": 0.8, "l1": 3.0}[norm])
    one = run(settings, seed=1)
    for step in range(1, 3):
        target = one.target()
        assert torch.equal(one.loss(), one.loss())
        assert relative_error(gradient(one.loss(), one.parameters), target) < 1e-11
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()
        before = one.loss()
        one.after_step(step)
        assert one.loss() != before


@pytest.mark.parametrize("inner", [name for name in METHODS if name not in ("free", "awp")])
def test_the_target_of_weight_perturbation_is_that_of_the_loss_within(inner: str) -> None:
    one = run(small("awp", trained={"name": "x", "method": "awp", "around": inner, "settings": {"gamma": 0.1}}), seed=0)
    assert relative_error(gradient(one.loss(), one.parameters), one.target()) < 1e-11


@pytest.mark.parametrize(
    ("trained", "block"),
    [
        ("pgd", EXAMPLE),
        ("trades", EXAMPLE),
        ("mart", EXAMPLE),
        ("alp", EXAMPLE),
        ("llr", EXAMPLE),
        ("awp", EXAMPLE),
        ("held_trades", CLEAN_DISTRIBUTION),
        ("vat", VIRTUAL_CLEAN),
        ("vat", VIRTUAL_DIRECTION),
        ("awp", WEIGHT_PERTURBATION),
        ("cure", CURVATURE_DIRECTION),
    ],
    ids=str,
)
def test_the_open_gradient_is_another(trained: str, block: object) -> None:
    """In L2, where directions have derivatives."""
    one = run(small(trained, norm="l2", epsilon=1.0), seed=1)
    target = one.target()
    with unblock(block):
        opened = gradient(one.loss(), one.parameters)
    assert relative_error(opened, target) > 1e-5


def test_weights_are_perturbed_also_where_the_example_is_not_held() -> None:
    """The gradient of the loss at ``w + v`` with v a constant and an example that follows w, by finite differences."""
    generator = torch.Generator().manual_seed(3)
    model = mlp(4, 3, widths=[3], activation=torch.nn.Tanh, generator=generator).double()
    x, labels = torch.rand(5, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    ball = {"epsilon": 0.3, "norm": "l2", "bounds": None}
    attack = PGD(steps=2, random_start=False)
    parameters = dict(model.named_parameters())
    example = attack.example(model, x, labels, ball=ball, generator=generator)
    moved = weight_perturbation(model, lambda m: F.cross_entropy(m(example), labels), gamma=0.2)
    step = {name: (value - parameters[name]).detach() for name, value in moved.items()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        found = attack.example(model, x, labels, ball=ball, generator=generator)
        there = {name: value + step.get(name, 0) for name, value in values.items()}
        return F.cross_entropy(torch.func.functional_call(model, there, found), labels)

    method = AWP(method=attack, gamma=0.2)
    value = method.loss(model, x, labels, ball=ball, generator=generator)
    with unblock(EXAMPLE):
        surrogate = method.loss(model, x, labels, ball=ball, generator=generator)
    opened = gradient(surrogate, parameters)
    assert torch.equal(surrogate, value)
    assert relative_error(opened, finite_differences(loss, parameters)) < 1e-8


# --- how models are judged, and the other methods ------------------------------------------------------------------


@pytest.mark.slow
def test_scores_are_shares_of_the_held_out_digits_and_leave_the_modes_alone() -> None:
    settings = config(steps=60, evaluate_every=60)
    one = run(settings, seed=0)
    metrics = {name: values[-1] for name, values in train(one, settings).metrics.items()}
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[1258:]
    data = load_digits()
    x = torch.tensor(data.data / 16).reshape(-1, 1, 8, 8)[order]
    labels = torch.tensor(data.target)[order]
    model = torch.nn.Sequential(torch.nn.Flatten(), *mlp(64, 10, generator=torch.Generator())).double()
    model.load_state_dict(dict(one.parameters))
    ball = {"epsilon": 0.3, "norm": "linf", "bounds": (0, 1)}
    tried = [x, fgsm(model, x, labels, **ball), pgd(model, x, labels, **ball, steps=20)]
    tried.append(multi_target(model, x, labels, **ball, steps=10))
    right = torch.stack([model(inputs).argmax(1) == labels for inputs in tried]).cummin(0).values
    names = ["clean accuracy", "accuracy after one step (FGSM)", "accuracy after many steps, too (PGD)", "objective"]
    expected = dict(zip(names, right.double().mean(1).tolist(), strict=True))
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert len(labels) == 539
    assert len(set(expected.values())) == 4
    frozen = torch.nn.Sequential(model, torch.nn.Dropout(0.5).eval()).train()
    before = [module.training for module in frozen.modules()]
    test = _data(settings)[1]
    assert _scores(frozen, test=test, ball=ball, steps=1)["clean accuracy"] == metrics["clean accuracy"]
    assert [module.training for module in frozen.modules()] == before


@pytest.mark.slow
def test_parts_of_the_held_out_images_are_judged_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small("fgsm", steps=30, ensemble=[0.1])
    one = run(settings, seed=0)
    train(one, settings)
    whole, ensemble = one.evaluate(), one.sweep.evaluate()
    monkeypatch.setattr("experiments.adversarial_training._PIXELS_AT_ONCE", 64 * 100)
    assert one.evaluate() == whole
    (found,), (expected,) = one.sweep.evaluate().values(), ensemble.values()
    assert found == pytest.approx(expected, abs=2.1 / 539)  # random starts are others
    assert expected[0] <= whole["clean accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fgsm", "free"])
def test_other_methods_take_as_many_updates_as_the_first(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = METHODS[method].step

    def counted(self: object, *arguments: object, update: object, **options: object) -> object:
        def tell(loss: Tensor) -> None:
            seen.append(loss.item())
            update(loss)

        return step(self, *arguments, update=tell, **options)

    settings = {"replays": 4} if method == "free" else {}
    other = {"name": "other", "method": method, "settings": settings}
    chosen = small("fgsm", steps=8 * 26, evaluate_every=52, methods=[other], ensemble=[0.03], epsilon=0.03)
    methods = run(chosen, seed=0).methods
    monkeypatch.setattr(METHODS[method], "step", counted)
    (trained,) = train_methods(methods).values()
    assert len(seen) == 8 * 26
    assert (methods.label, methods.steps) == ("epoch", (0, 2, 4, 6, 8))
    counts = {name: len(values) for name, values in trained["metrics"].items()}
    many = 5 if method == "fgsm" else 1
    assert counts == {
        "objective": many,
        "accuracy after many steps, too (PGD)": many,
        "accuracy after one step (FGSM)": many,
        "clean accuracy": many,
        "accuracy under the ensemble": 1,
    }
    robust = trained["metrics"]["accuracy under the ensemble"][-1]
    assert 0.2 < robust <= trained["metrics"]["objective"][-1] + 0.01


def test_other_methods_depend_on_the_seed_alone_and_start_where_the_first_does() -> None:
    methods = [{"name": name, "method": "rs_fgsm"} for name in "ab"]
    settings = small("fgsm", methods=methods, steps=26, evaluate_every=26)
    found = [[t["metrics"] for t in train_methods(run(settings, seed).methods).values()] for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
    assert found[0] != found[2]
    assert found[0][0]["objective"][0] == run(settings, seed=0).evaluate()["objective"]


# --- findings ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_learns_one_step_falls_to_many_and_a_trained_against_many_does_not() -> None:
    """With seven seeds at most 0.4 % stand attacks towards every class, and 10 to 12 % trained against five steps."""
    name, once, clean = "adversarial_overfitting", "accuracy after one step (FGSM)", "clean accuracy"
    settings = config(name, steps=400, evaluate_every=400)
    fast = {key: values[-1] for key, values in train(run(settings, seed=0), settings).metrics.items()}
    settings = config(
        name, steps=400, evaluate_every=400, trained={"name": "x", "method": "pgd", "settings": {"steps": 5}}
    )
    slow = {key: values[-1] for key, values in train(run(settings, seed=0), settings).metrics.items()}
    assert min(fast[clean], slow[clean]) > 0.75
    assert min(fast[once], slow[once]) > 0.3
    assert fast["objective"] < 0.03
    assert slow["objective"] > 0.08


def test_signs_have_no_derivative() -> None:
    """Overfitting is not the block's doing: opened, it changes not a bit."""
    settings = config("adversarial_overfitting", steps=20, evaluate_every=20)
    blocked = train(run(settings, seed=0), settings)
    with unblock(EXAMPLE):
        assert train(run(settings, seed=0), settings) == blocked


@pytest.mark.slow
def test_virtual_directions_that_move_are_moved_away() -> None:
    """With the direction open the model passes its own probe, and falls to what the probe no longer finds."""
    settings = config("adversarial_vat", steps=200, evaluate_every=200)
    ends, shares = {}, {}
    for name, opened in (("blocked", []), ("clean", [VIRTUAL_CLEAN]), ("direction", [VIRTUAL_DIRECTION])):
        one = run(settings, seed=0)
        with unblock(*opened):
            train(one, settings)
        ends[name] = one.evaluate()
        shares[name] = _found_by_the_probe(settings, one.parameters)
    once, often = "accuracy after one step (FGSM)", "accuracy after many steps, too (PGD)"
    assert ends["direction"]["objective"] < 0.7 * ends["blocked"]["objective"]
    assert ends["direction"][once] > ends["blocked"][once] + 0.02
    assert ends["clean"][often] > ends["blocked"][often] + 0.01
    assert ends["clean"]["objective"] < ends["blocked"]["objective"] + 0.01
    assert shares["direction"] < 0.9 * shares["blocked"]


def _found_by_the_probe(settings: Config, parameters: dict[str, Tensor]) -> float:
    """Return which part of the largest divergence in the ball is found at the virtual adversarial example."""
    data, test = _data(settings)
    model = _network(settings, data, seed=0)
    model.load_state_dict(parameters)
    x, labels = test.inputs, test.labels
    clean = model(x).log_softmax(1).detach()

    def moved(logits: Tensor, labels: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(1), clean, log_target=True, reduction="none").sum(1)

    ball = {"epsilon": settings.epsilon, "norm": settings.norm}
    probe = moved(model(virtual_example(model, x, **ball)), labels).detach()
    start = partial(nearby_pgd, model, x, labels, **ball, steps=40, loss=moved)
    worst = [
        moved(model(start(generator=torch.Generator().manual_seed(seed), start=0.05)), labels).detach()
        for seed in range(3)
    ]
    return (probe.sum() / torch.stack([*worst, probe]).amax(0).sum()).item()


@pytest.mark.slow
def test_a_clean_answer_that_is_held_costs_clean_accuracy() -> None:
    """With eight seeds 5 to 7 %."""
    settings = config("adversarial_trades", steps=120, evaluate_every=120)
    blocked = train(run(settings, seed=0), settings).metrics["clean accuracy"][-1]
    with unblock(CLEAN_DISTRIBUTION):
        opened = train(run(settings, seed=0), settings).metrics["clean accuracy"][-1]
    assert opened > blocked + 0.02


# --- configs that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trained={name='x', method='free'}", "'free' should stand among the other methods: it has no loss of its own"),
        (
            "trained={name='x', method='pgd', average=0.9}",
            "`average` should be left out here",
        ),
        ("trained={name='x', method='pgd', settings={step=3}}", "unexpected keyword argument 'step'"),
        ("trained={name='x', method='pgd', settings={steps=0}}", "`steps` should be a positive integer. Found 0."),
        ("trained={name='x', method='trades', settings={beta=-1}}", "`beta` should be"),
        ("trained={name='x', method='awp', around='free'}", "`method` should have a loss of its own"),
        ("methods=[{name='x', method='free', settings={replays=0}}]", "`replays` should be a positive integer"),
        ("methods=[{name='x', method='pdg'}]", "did you mean 'pgd'?"),
        ("methods=[{name='x', method='pgd'}, {name='x', method='fgsm'}]", "methods should have different names"),
        ("network=resnet18", "widths of 'resnet18' should be a list of 1, found 2"),
        ("widths=[3]\nnetwork=cnn", "widths of 'cnn' should be a list of 2, found 1"),
        ("data=mnist", "path should be given for data of your own, and for no other"),
        ("path=somewhere", "path should be given for data of your own, and for no other"),
        ("epsilon=0.0", "should be greater than 0"),
        ("ensemble=[0.0]", "should be greater than 0"),
    ],
    ids=lambda value: value if "=" in value else "",
)
def test_a_wrong_config_is_one_line(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"\A[^\n]*\Z") as caught:
        load_config(FOLDER / "adversarial_trades.toml", override.split("\n"))
    assert says in str(caught.value)


# --- the user's own images -----------------------------------------------------------------------------------------


def _write_idx(path: Path, values: np.ndarray) -> None:
    path.write_bytes(struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes())


def _files(name: str, folder: Path) -> Path:
    """Write digits as the data set `name` has them: 300 to train on and 60 to judge by, of CIFAR-10 a tenth of them."""
    data = load_digits()
    images, labels = (data.images[:360] * 15.9375).astype(np.uint8), data.target[:360].astype(np.uint8)
    if name == "mnist":
        for part, rows in (("train", slice(300)), ("t10k", slice(300, 360))):
            _write_idx(folder / f"{part}-images-idx3-ubyte", images[rows])
            _write_idx(folder / f"{part}-labels-idx1-ubyte", labels[rows])
    else:
        large = images.repeat(4, 1).repeat(4, 2)[:, None].repeat(3, 1).reshape(360, -1)
        rows = np.concatenate([labels[:, None], large], 1)
        for number in range(5):
            (folder / f"data_batch_{number + 1}.bin").write_bytes(rows[6 * number : 6 * (number + 1)].tobytes())
        (folder / "test_batch.bin").write_bytes(rows[300:306].tobytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "network", "changes"),
    [
        (
            "mnist",
            [4, 6],
            {"batch_size": 30, "steps": 60, "evaluate_every": 60, "epsilon": 0.02, "learning_rate": 0.02},
        ),
        ("cifar10", [2], {"batch_size": 10, "steps": 2, "evaluate_every": 2, "evaluation_steps": 2}),
    ],
    ids=["mnist", "cifar10"],
)
def test_a_network_is_trained_on_files_and_judged(name: str, network: list[int], changes: dict, tmp_path: Path) -> None:
    values = {"path": _files(name, tmp_path), "widths": network, "ensemble": [0.02], "threads": 1, **changes}
    arguments = [argument for key, value in values.items() for argument in ("--set", f"{key}={value}")]
    results = tmp_path / "results"
    done = CliRunner().invoke(main, ["run", str(OWN[name]), *arguments, "--results", str(results)])
    assert done.exit_code == 0, done.output
    (path,) = results.glob(f"adversarial_{name}/*/seed-000/record.json")
    record = json.loads(path.read_text())
    blocked, opened = record["variants"].values()
    assert blocked["metrics"] == opened["metrics"]
    assert record["comparison"]["first"]["target_error"]["blocked"] < 1e-4
    assert list(blocked["sweep"]) == ["accuracy under the ensemble"]
    trained = record["methods"]["trained"]
    assert len(trained) == len(tomllib.loads(OWN[name].read_text())["methods"])
    if name == "mnist":
        assert max(found["metrics"]["clean accuracy"][-1] for found in trained.values()) > 0.5
    done = CliRunner().invoke(main, ["report", "--results", str(results)])
    assert done.exit_code == 0, done.output
    page = "".join(path.read_text() for path in results.rglob("*.html"))
    for reference in tomllib.loads(OWN[name].read_text())["references"]:
        assert reference in page


def test_pixels_of_files_are_divided_by_255(tmp_path: Path) -> None:
    settings = load_config(OWN["mnist"], [f"path={_files('mnist', tmp_path)}", "held_out=7", "batch_size=300"]).config
    data, test = _data(settings)
    assert data.inputs.dtype == torch.uint8
    raw = np.frombuffer((tmp_path / "t10k-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(60, 1, 8, 8)
    assert torch.equal(test.inputs, torch.tensor(raw[:7]).float() / 255)
    assert test.labels.tolist() == load_digits().target[300:307].tolist()


@pytest.mark.slow
def test_a_loss_of_a_network_with_statistics_has_its_target(tmp_path: Path) -> None:
    """To look for the target leaves the running statistics alone, which the attack of the next loss depends on."""
    changes = [f"path={_files('cifar10', tmp_path)}", "widths=[2]", "dtype=float64", "batch_size=20", "methods=[]"]
    for method in ("pgd", "trades", "cure"):
        trained = f"trained={{name='x', method='{method}'}}"
        settings = load_config(OWN["cifar10"], [*changes, trained, "augment=true"]).config
        one, other = run(settings, seed=0), run(settings, seed=0)
        for each in (one, other):
            each.loss()  # moves the statistics away from their start
        target = one.target()
        assert torch.equal(one.loss(), other.loss())
        again = run(settings, seed=0)
        again.loss()
        assert relative_error(gradient(again.loss(), again.parameters), target) < 1e-9


@pytest.mark.parametrize("name", OWN)
def test_without_its_files_a_config_ends_with_a_line(name: str, tmp_path: Path) -> None:
    missing = f"path={tmp_path / 'nowhere'}"
    done = CliRunner().invoke(main, ["run", str(OWN[name]), "--set", missing, "--results", str(tmp_path)])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert f": path: `{tmp_path / 'nowhere'}" in line or "nowhere" in line


def test_files_of_another_form_are_a_line(tmp_path: Path) -> None:
    _files("mnist", tmp_path)
    _write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((300, 8, 7), np.uint8))
    with pytest.raises(ConfigError, match="images should be square; they have 56 pixels"):
        load_config(OWN["mnist"], [f"path={tmp_path}"])
