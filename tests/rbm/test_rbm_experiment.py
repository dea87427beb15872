"""The contrastive-divergence experiment: what it trains on, that a step is what it says, and what its configs find."""

import json
import math
import statistics
import struct
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from contract import relative_error
from folders import CONFIGS
from sklearn.datasets import load_digits
from sklearn.neural_network import BernoulliRBM

from experiments import _rbm_methods
from experiments._rbm_methods import Method, batches
from experiments.rbm import Config, _images, run
from toolkit import unblock
from toolkit.rbm import (
    CENTERED_COORDINATES,
    CENTERING_OFFSETS,
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    RBM,
    STRAIGHT_THROUGH,
    base_rate_bias,
    contrastive_divergence,
    persistent_contrastive_divergence,
)
from toolkit.runner._command import main
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._training import train, train_methods

FOLDER = CONFIGS
CONFIGS = [file for file in sorted(FOLDER.glob("rbm_*.toml")) if tomllib.loads(file.read_text())["experiment"] == "rbm"]
MNIST = FOLDER / "own_data" / "rbm_mnist.toml"


def _config(name: str, **values) -> Config:
    file = next(file for file in CONFIGS if file.stem == f"rbm_{name}")
    return load_config(file).config.model_copy(update=values)


def _objectives(config: Config, seed: int, *opened: list) -> list[list[float]]:
    """Return the objective along each run from one seed, with these blocks open."""
    found = []
    for blocks in opened:
        with unblock(*blocks):
            found.append(train(run(config, seed), config).metrics["objective"])
    return found


def _gradient(loss, parameters):
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_target_is_the_gradient_of_every_update(file):
    """Also after updates: the witness makes the draws that the next loss makes, and spoils none of them."""
    config = load_config(file).config
    one = run(config, seed=1)
    for step in range(1, 4):
        target = one.target()
        one.evaluate()
        loss = one.loss()
        assert torch.equal(loss, one.loss())
        tolerance = 1e-12 if config.dtype == "float64" else 5e-5
        assert relative_error(_gradient(loss, one.parameters), target) < tolerance
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()
        one.after_step(step)
        assert one.loss() != loss


def test_training_is_the_plain_loop():
    """Two persistent updates written out: the second goes on with the chains, and with the draws, of the first."""
    config = _config("persistent", steps=2, learning_rate=0.25)
    one = run(config, seed=3)
    train(one, config)

    generator, draws = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    images, _ = _images(config)
    rbm = RBM(9, config.n_hidden, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        rbm.visible_bias.copy_(base_rate_bias(images))
    torch.randperm(140, generator=generator)  # the order of the images, all of which are in the one batch
    chains = images[torch.randint(140, (280,), generator=generator)]
    parameters = dict(rbm.named_parameters())
    for _ in range(2):
        loss, chains = persistent_contrastive_divergence(rbm, images, chains, steps=1, generator=draws)
        gradients = _gradient(loss, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= 0.25 * gradients[name]
    assert relative_error(one.parameters, parameters) < 1e-13


def test_objective_of_bars_and_stripes_is_exact_and_its_best_is_the_entropy():
    one = run(_config("mean_field"), seed=0)
    metrics = one.evaluate()
    assert one.objective.best == -math.log(14)
    # At the start all 512 images are about equally likely.
    assert metrics["objective"] == pytest.approx(-math.log(512), abs=0.02)
    assert metrics["probability of drawing a bar or stripe image"] == pytest.approx(14 / 512, rel=0.02)


def test_digits_are_held_out_zeros_and_ones():
    config = _config("digits")
    images, held_out = _images(config)
    assert (len(images), len(held_out)) == (1437, 360)
    assert set(images.unique().tolist()) == set(held_out.unique().tolist()) == {0.0, 1.0}
    rate = base_rate_bias(images).sigmoid()
    independent_pixels = (held_out * rate.log() + (1 - held_out) * (1 - rate).log()).sum(1).mean().item()
    # At the start the machine is hardly more than the base rate of each pixel.
    assert run(config, seed=0).evaluate()["objective"] == pytest.approx(independent_pixels, abs=0.02)


def test_digits_are_split_as_in_the_benchmarks():
    images, held_out = _images(_config("digits"))
    order = np.random.RandomState(0).permutation(1797)
    everything = (load_digits().data >= 8).astype(np.float32)
    assert np.array_equal(images.numpy(), everything[order[:1437]])
    assert np.array_equal(held_out.numpy(), everything[order[1437:]])


def test_sampled_runs_are_identical_with_and_without_the_block():
    config = _config("digits", steps=30, evaluate_every=30)
    blocked = train(run(config, seed=0), config)
    with unblock(NEGATIVE_SAMPLES):
        opened = train(run(config, seed=0), config)
    assert blocked == opened


@pytest.mark.slow
@pytest.mark.parametrize("name", ["straight_through", "persistent"])
def test_straight_through_draws_need_the_block(name):
    config = _config(name, steps=500, evaluate_every=500)
    blocked = train(run(config, seed=0), config)
    with unblock(NEGATIVE_SAMPLES):
        opened = train(run(config, seed=0), config)
    other = [NEGATIVE_SAMPLES, STRAIGHT_THROUGH] if name == "straight_through" else [PERSISTENT_CHAINS]
    with unblock(*other):
        harmless = train(run(config, seed=0), config)
    assert blocked.metrics["objective"][-1] > opened.metrics["objective"][-1] + 0.8
    assert harmless.metrics["objective"][-1] == pytest.approx(blocked.metrics["objective"][-1], abs=1e-6)


@pytest.mark.slow
def test_mean_field_rises_and_falls_with_the_block_and_stalls_without():
    """Of 20 seeds all rise further with the block, by 0.28 to 0.75, and 17 end below the run without."""
    config = _config("mean_field", steps=1000, evaluate_every=100)
    further, below = [], []
    for seed in range(config.seeds):
        blocked, opened = _objectives(config, seed, [], [NEGATIVE_SAMPLES])
        further.append(max(blocked) - max(opened))
        below.append(opened[-1] - blocked[-1])
        assert opened[-1] - opened[5] < 0.05
    assert min(further) > 0.2
    assert statistics.median(below) > 0.3


@pytest.mark.slow
def test_centred_steps_need_the_block_at_the_offsets():
    """Centred steps get 1.3 to 2.1 nats further, of 6 seeds. Open offsets ruin 14 of 20, to below -8.4, and no others.

    Draws are in float32, and part at the first one that rounding decides: which seeds are ruined is the machine's.
    """
    config = _config("bars_and_stripes", methods=[], steps=1500, evaluate_every=1500)
    (*_, blocked), (*_, plain) = _objectives(config, 0, [], [CENTERED_COORDINATES])
    assert blocked > plain + 0.5
    ends = (_objectives(config, seed, [CENTERING_OFFSETS])[0][-1] for seed in range(10))
    assert any(end < plain - 1 for end in ends)


def test_with_the_coordinates_open_a_step_is_the_plain_one():
    """Another program, the same numbers: the same config without centring."""
    config = _config("bars_and_stripes", methods=[], steps=20, dtype="float64")
    with unblock(CENTERED_COORDINATES):
        opened = train(run(config, seed=2), config)
    plain = train(run(config.model_copy(update={"centered": False}), seed=2), config)
    assert opened.metrics["objective"] == pytest.approx(plain.metrics["objective"], abs=1e-12)


# --- other methods -----------------------------------------------------------------------------------------------


def _trained(config: Config, seed: int = 0):
    return train_methods(run(config, seed).methods)


@pytest.mark.parametrize("average_from", [None, 0.5], ids=["last parameters", "averaged"])
@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("none", [0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.4, 0.3, 0.2, 0.1]),
        ("cosine", [0.4, 0.341421356, 0.2, 0.058578644]),
    ],
)
def test_a_method_takes_the_steps_of_autograd(decay, rates, average_from):
    """Four updates of CD-2 on batches, written out."""
    method = Method(name="x", learning_rate=0.4, decay=decay, gibbs_steps=2, average_from=average_from)
    config = _config("mean_field", methods=[method], steps=2, updates_per_step=2, evaluate_every=1, batch_size=5)
    ((_, found),) = _trained(config, seed=3).items()

    images, _ = _images(config)
    rbm = RBM(9, config.n_hidden, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        rbm.visible_bias.copy_(base_rate_bias(images))
    order, draws = (torch.Generator().manual_seed(3) for _ in range(2))
    batch, kept, expected = batches(14, 5, order), [], []
    parameters = dict(rbm.named_parameters())
    for update in range(5):
        if update in (0, 2, 4):
            judged = kept[-1:] if average_from is None else kept[2:]
            means = (
                {key: torch.stack([at[key] for at in judged]).mean(0) for key in parameters} if judged else parameters
            )
            machine = RBM(9, config.n_hidden, dtype=torch.float64)
            machine.load_state_dict(means)
            expected.append(machine.log_likelihood(images).mean().item())
        if update < 4:
            gradients = _gradient(
                contrastive_divergence(rbm, images[next(batch)], steps=2, generator=draws), parameters
            )
            with torch.no_grad():
                for key, parameter in parameters.items():
                    parameter -= rates[update] * gradients[key]
            kept.append({key: parameter.detach().clone() for key, parameter in parameters.items()})
    assert found["metrics"]["objective"] == pytest.approx(expected, abs=1e-9)
    assert len(set(expected)) == 3


def test_what_a_method_says_reaches_the_trainer(monkeypatch):
    seen = {}

    class Recorder(_rbm_methods.FusedTrainer):
        def __init__(self, rbm, **options):
            seen.update(options)
            super().__init__(rbm, **options)

    monkeypatch.setattr(_rbm_methods, "FusedTrainer", Recorder)
    said = {"gibbs_steps": 3, "chains": 7, "offset_rate": 0.25, "weight_decay": 0.125}
    for more in ({"temperatures": 4}, {"fast_rate": 0.5}):
        method = Method(name="x", learning_rate=0.1, **said, **more)
        _trained(_config("mean_field", methods=[method], steps=1))
        assert (seen["steps"], seen["offset_rate"], seen["weight_decay"]) == (3, 0.25, 0.125)
        assert seen["chains"].shape == (7, 8)
        assert set(seen["chains"].unique().tolist()) == {0, 1}
        assert seen["fast_rate"] == more.get("fast_rate")
        if "temperatures" in more:
            torch.testing.assert_close(seen["inverse_temperatures"], torch.tensor([0, 1 / 3, 2 / 3, 1]).double())
        else:
            assert seen["inverse_temperatures"] is None


def test_a_method_depends_on_the_seed_alone():
    method = Method(name="x", learning_rate=0.1, chains=5, temperatures=3)
    config = _config("mean_field", methods=[method, method.model_copy(update={"name": "y"})], steps=20)
    trained = [_trained(config, seed) for seed in (0, 0, 1)]
    one, two, other = ([found["metrics"] for found in part.values()] for part in trained)
    assert one == two
    assert one[0] == one[1]
    assert one != other


def test_scikit_learn_is_judged_by_its_own_parameters():
    config = _config("digits", estimators=["sklearn.neural_network.BernoulliRBM"], n_hidden=3)
    ((name, found),) = _trained(config, seed=4).items()
    assert name == "sklearn.neural_network.BernoulliRBM at its defaults"
    images, held_out = (part.numpy() for part in _images(config))
    fitted = BernoulliRBM(n_components=3, random_state=4).fit(images)
    hidden = np.array(np.meshgrid(*[[0, 1]] * 3)).reshape(3, -1).T
    log_partition = np.logaddexp.reduce(
        hidden @ fitted.intercept_hidden_
        + np.logaddexp(0, hidden @ fitted.components_ + fitted.intercept_visible_).sum(1)
    )
    expected = [-(fitted._free_energy(part).mean() + log_partition) for part in (held_out, images)]
    assert [values[0] for values in found["metrics"].values()] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_the_estimator_of_this_project_is_better_than_scikit_learns():
    config = _config("defaults", methods=[])
    objectives = [found["metrics"]["objective"][-1] for found in _trained(config).values()]
    assert len(objectives) == 2
    assert objectives[0] > objectives[1] + 1


def _curves(first: int, last: int, seed: int, **values) -> list[list[float]]:
    config = _config("bars_and_stripes", **values)
    config = config.model_copy(update={"methods": config.methods[first:last]})
    return [found["metrics"]["objective"] for found in _trained(config, seed).values()]


@pytest.mark.slow
def test_the_likelihood_of_cd_and_of_pcd_rises_and_falls():
    """Fischer & Igel 2010, in exact numbers.

    Of 20 seeds all rise by more than 4.8, to a peak between steps 150 and 400, which a coarser look would miss. Until
    step 2000 CD falls by 1.2 (the median; at least by 0.6), and PCD by 12 (at least by 5.9).
    """
    curves = [_curves(0, 2, seed, steps=2000, evaluate_every=100) for seed in range(3)]
    for way, fall in ((0, 0.5), (1, 4)):
        mine = [curve[way] for curve in curves]
        assert statistics.median(max(curve[:6]) - curve[0] for curve in mine) > 4
        assert statistics.median(max(curve) - curve[-1] for curve in mine) > fall


@pytest.mark.slow
def test_centred_tempering_comes_close_to_the_best_possible():
    """Of 6 seeds one ends between -3.430 and -3.423, and the other between -3.407 and -3.405."""
    ((*_, tempered), (*_, averaged)) = _curves(2, 4, seed=0, steps=3000, evaluate_every=3000)
    assert tempered > -3.44
    assert -3.41 < averaged <= -math.log(30)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperatures": 2}, "`chains` should be given beside `temperatures` or `fast_rate`"),
        ({"fast_rate": 0.1}, "`chains` should be given beside `temperatures` or `fast_rate`"),
        (
            {"fast_rate": 0.1, "temperatures": 2, "chains": 3},
            "`fast_rate` should be left out",
        ),
        ({"average_from": 1.0}, "methods.average_from: should be less than 1"),
        ({"decay": "sometimes"}, "methods.decay: should be 'none', 'linear' or 'cosine'"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_method_is_one_line(wrong, says):
    table = ", ".join(
        f"{key} = {json.dumps(value)}" for key, value in {"name": "x", "learning_rate": 1.0, **wrong}.items()
    )
    with pytest.raises(ConfigError) as caught:
        load_config(FOLDER / "rbm_digits.toml", [f"methods=[{{{table}}}]"])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("n_hidden=21", "n_hidden should be at most 20, so that the likelihood is exact"),
        ("data=idx", '`images` and `held_out` should be given with data = "idx"'),
        (
            "methods=[{name='x', learning_rate=1.0}, {name='x', learning_rate=2.0}]",
            "methods should have different names",
        ),
        ("estimators=['sklearn.neural_network.MLPRegressor']", "should be 'toolkit.rbm.BernoulliRBM' or"),
    ],
    ids=["too many units", "no files", "two of a name", "estimator"],
)
def test_a_wrong_config_is_one_line(override, says):
    with pytest.raises(ConfigError, match=r"\A[^\n]*\Z") as caught:
        load_config(FOLDER / "rbm_digits.toml", [override])
    assert says in str(caught.value)


# --- the user's own images -----------------------------------------------------------------------------------------


def _write_idx(path: Path, images: np.ndarray) -> Path:
    head = struct.pack(f">BBBB{images.ndim}I", 0, 0, 8, images.ndim, *images.shape)
    path.write_bytes(head + images.astype(np.uint8).tobytes())
    return path


@pytest.fixture
def files(tmp_path):
    """Two files of small images: 300 to train on, 60 to judge by, pixels from 0 to 255."""
    images = (load_digits().images[:360] * 15.9375).astype(np.uint8)[:, 1:, 2:7]
    return _write_idx(tmp_path / "images", images[:300]), _write_idx(tmp_path / "held-out", images[300:])


def _overrides(files, **values):
    values = {"images": str(files[0]), "held_out": str(files[1]), **values}
    return [f"{key}={value}" for key, value in values.items()]


def test_images_of_files_are_rounded_at_the_threshold(files):
    config = load_config(MNIST, _overrides(files, threshold=111)).config
    images, held_out = _images(config)
    assert (images.shape, held_out.shape) == ((300, 35), (60, 35))
    assert images.dtype == torch.uint8
    raw = np.frombuffer(files[1].read_bytes(), np.uint8, offset=16).reshape(60, 35)
    assert np.array_equal(held_out.numpy(), (raw >= 111).astype(np.uint8))
    assert (raw == 111).any()


@pytest.mark.slow
def test_a_machine_of_files_is_trained_and_judged_from_both_sides(files, tmp_path):
    few = _overrides(
        files, n_hidden=8, steps=300, evaluate_every=300, learning_rate=0.2,
        updates_per_step=1, annealing_chains=200,
        inverse_temperatures=200, sampling_steps=200, threads=1,
    )  # fmt: skip
    arguments = [argument for override in few for argument in ("--set", override)]
    results = tmp_path / "results"
    done = CliRunner().invoke(main, ["run", str(MNIST), *arguments, "--results", str(results)])
    assert done.exit_code == 0, done.output
    (path,) = results.glob("rbm_mnist/*/seed-000/record.json")
    record = json.loads(path.read_text())
    trained = [*record["variants"].values(), *record["methods"]["trained"].values()]
    assert len(trained) == 3 + 2
    for found in trained:
        forward, reverse, _ = found["metrics"].values()
        assert forward[-1] == pytest.approx(reverse[-1], abs=0.2)
    blocked = trained[0]["metrics"]["objective"]
    assert blocked[-1] > blocked[0] + 0.5
    assert record["comparison"]["first"]["target_error"]["blocked"] < 1e-4
    done = CliRunner().invoke(main, ["report", "--results", str(results)])
    assert done.exit_code == 0, done.output
    page = "".join(path.read_text() for path in results.rglob("*.html"))
    assert "-84.86" in page
    assert "-96.61" in page


@pytest.mark.slow
def test_both_sides_agree_with_the_exact_likelihood(files):
    config = load_config(MNIST, _overrides(files, n_hidden=6, dtype="float64", inverse_temperatures=300)).config
    one = run(config, seed=0)
    rbm = RBM(35, 6, dtype=torch.float64)
    rbm.load_state_dict(dict(one.parameters))
    with torch.no_grad():
        for parameter in (*rbm.parameters(), *one.parameters.values()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.4)
    held_out = _images(config)[1].double()
    exact = rbm.log_likelihood(held_out).mean().item()
    forward, reverse, error = one.evaluate().values()
    assert one.evaluate()["objective"] == forward
    assert 0 < error < 0.1
    assert forward == pytest.approx(exact, abs=4 * error)
    assert reverse == pytest.approx(exact, abs=0.3)


def test_without_its_files_a_config_ends_with_a_line_for_each(tmp_path):
    done = CliRunner().invoke(main, ["run", str(MNIST), "--results", str(tmp_path)])
    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["images", "held_out"]
    assert all("should be a file that exists, found 'data/mnist/" in line for line in lines)


def test_a_folder_of_configs_leaves_out_those_that_need_files():
    from toolkit.runner._choice import chosen_configs

    assert MNIST.stem not in {loaded.name for loaded in chosen_configs([FOLDER], [], [])}


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (np.zeros((4, 3)), "images and held_out should have the same number of pixels"),
        (np.zeros(4), "the file should have images, of two dimensions or more; its sizes are (4,)"),
        (np.zeros((0, 2, 2)), "the file should have at least one image; it has none"),
    ],
    ids=["other pixels", "labels", "nothing"],
)
def test_files_that_are_no_images_are_one_line(files, tmp_path, numbers, says):
    other = _write_idx(tmp_path / "other", numbers)
    with pytest.raises(ConfigError, match=r"\A[^\n]*\Z") as caught:
        load_config(MNIST, _overrides((files[0], other)))
    assert says in str(caught.value)


def test_images_that_would_all_be_black_are_an_error(tmp_path):
    """Zeros and ones, say, at a threshold for bytes."""
    path = _write_idx(tmp_path / "ones", np.eye(4).reshape(4, 2, 2))
    with pytest.raises(ConfigError, match="threshold should be at most the brightest pixel of images, 1; it is 128"):
        load_config(MNIST, _overrides((path, path)))
    assert load_config(MNIST, [*_overrides((path, path)), "threshold=1"]).config.threshold == 1


def test_a_folder_is_no_file_of_images(tmp_path):
    with pytest.raises(ConfigError, match="should be a file, not a folder"):
        load_config(MNIST, _overrides((tmp_path, tmp_path)))
