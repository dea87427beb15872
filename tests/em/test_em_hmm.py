"""Hidden Markov models: all paths enumerated, Fisher's identity with the block, the entropy of paths without it."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, relative_error
from each import each
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from test_em import gradient_of
from torch import Tensor
from torch import distributions as dist
from torch.func import grad
from values import seeded

from toolkit import unblock
from toolkit.em import COVARIANCE_TYPES, RESPONSIBILITIES, GaussianParameters, hmm
from toolkit.em import e_step as mixture_e_step
from toolkit.em import log_likelihood as mixture_log_likelihood
from toolkit.em import m_step as mixture_m_step
from toolkit.em.estimators.hmm import CategoricalHMM, GaussianHMM
from toolkit.em.hmm import _chain, _engine
from toolkit.em.hmm import _plan as plans
from toolkit.em.hmm import _recursions as recursions
from toolkit.em.hmm._viterbi import best_paths
from toolkit.gradients.memory import LiveBytes

F64 = torch.float64
KINDS = (*COVARIANCE_TYPES, "categorical")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_type = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def model(kind: str = "full", k: int = 3, d: int = 2, seed: int = 0, apart: float = 1.5) -> hmm.HMMParameters:
    """Return a model that is symmetric in nothing; for symbols there are d + 2 of them."""
    g = seeded(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=F64)

    transition, first = (0.8 * normal(k, k)).softmax(1), normal(k).softmax(0)
    if kind == "categorical":
        emissions = hmm.CategoricalEmissions(log_probabilities=(1.5 * normal(k, d + 2)).log_softmax(1))
    else:
        triangle = d * (d + 1) // 2
        shape = {"full": (k, triangle), "tied": (triangle,), "diag": (k, d), "spherical": (k,)}[kind]
        ones = {"full": (k, d, d), "tied": (d, d), "diag": (k, d), "spherical": (k,)}[kind]
        emissions = hmm.GaussianEmissions(
            means=torch.zeros(k, d, dtype=F64), precisions_cholesky=torch.ones(ones, dtype=F64), covariance_type=kind
        ).with_unconstrained({"means": apart * normal(k, d), "log_cholesky": 0.4 * normal(*shape)})
    return hmm.HMMParameters.of(start=first, transition=transition, emissions=emissions)


def data(parameters: hmm.HMMParameters, lengths: list[int], seed: int = 1) -> Tensor:
    return hmm.sample(parameters, lengths, generator=seeded(seed))[0]


def array(values: Tensor) -> np.ndarray:
    return values.detach().numpy()


def _cut(monkeypatch: pytest.MonkeyPatch, block: int | None) -> None:
    """Let sequences be cut into blocks of so many steps; 0: none is. None: as is estimated to be fastest."""
    if block is not None:
        monkeypatch.setattr(_engine, "is_short", lambda lengths, n_states: False)
        monkeypatch.setattr(_engine, "plan", functools.partial(plans.plan, block=block))


# --- the witness: every path, one by one ------------------------------------------------------------------------------


def log_prob_by_torch(parameters: hmm.HMMParameters, x: Tensor) -> Tensor:
    """Return emissions (N, K) by torch.distributions."""
    emissions = parameters.emissions
    if isinstance(emissions, hmm.CategoricalEmissions):
        return dist.Categorical(logits=emissions.log_probabilities).log_prob(x[:, None])
    k, d = emissions.means.shape
    covariances = emissions.covariances
    eye = torch.eye(d, dtype=F64)
    match emissions.covariance_type:
        case "tied":
            covariances = covariances.expand(k, d, d)
        case "diag":
            covariances = torch.diag_embed(covariances)
        case "spherical":
            covariances = covariances[:, None, None] * eye
    return dist.MultivariateNormal(emissions.means, covariances).log_prob(x[:, None])


def all_paths(parameters: hmm.HMMParameters, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return every path of one sequence (P, T), and its log joint density with the data (P,)."""
    k, t = parameters.n_states, len(x)
    paths = torch.tensor(list(itertools.product(range(k), repeat=t)))
    log_prob = log_prob_by_torch(parameters, x)
    joint = parameters.log_start[paths[:, 0]] + log_prob[torch.arange(t), paths].sum(1)
    return paths, joint + parameters.log_transition[paths[:, :-1], paths[:, 1:]].sum(1)


def enumerated(parameters: hmm.HMMParameters, x: Tensor, lengths: list[int]) -> hmm.Posteriors:
    k = parameters.n_states
    states, values = [], []
    first, pairs = torch.zeros(k, dtype=F64), torch.zeros(k, k, dtype=F64)
    for part in x.split(lengths):
        paths, joint = all_paths(parameters, part)
        share = joint.softmax(0)
        values.append(joint.logsumexp(0))
        one_hot = torch.nn.functional.one_hot(paths, k).to(F64)
        states.append(torch.einsum("p,ptk->tk", share, one_hot))
        first = first + states[-1][0]
        pairs = pairs + torch.einsum("p,pti,ptj->ij", share, one_hot[:, :-1], one_hot[:, 1:])
    return hmm.Posteriors(states=torch.cat(states), start=first, transitions=pairs, log_likelihoods=torch.stack(values))


def entropy_of_paths(parameters: hmm.HMMParameters, x: Tensor, lengths: list[int]) -> Tensor:
    """Return the entropy of the path posterior, nats, summed over the sequences."""
    joints = [all_paths(parameters, part)[1] for part in x.split(lengths)]
    return torch.stack([torch.special.entr(joint.softmax(0)).sum() for joint in joints]).sum()


def differences(one: hmm.Posteriors, other: hmm.Posteriors) -> dict[str, float]:
    names = [field.name for field in dataclasses.fields(one)]
    return {name: float((getattr(one, name) - getattr(other, name)).abs().max()) for name in names}


def parameter_difference(one: hmm.HMMParameters, other: hmm.HMMParameters) -> float:
    def plain(parameters: hmm.HMMParameters) -> dict[str, Tensor]:
        leaves = parameters.unconstrained()
        return {name: leaf.exp() if "log" in name else leaf for name, leaf in leaves.items()}

    return relative_error(plain(one), plain(other))


LENGTHS = [4, 1, 5]


def leaves_of(parameters: hmm.HMMParameters) -> dict[str, Tensor]:
    return {name: leaf.clone().requires_grad_() for name, leaf in parameters.unconstrained().items()}


def case(kind: str) -> BlockCase:
    whole = model(kind)
    x = data(whole, LENGTHS)

    def log_likelihood(leaves: Mapping[str, Tensor]) -> Tensor:
        return enumerated(whole.with_unconstrained(leaves), x, LENGTHS).log_likelihoods.sum() / len(x)

    def less_entropy(leaves: Mapping[str, Tensor]) -> Tensor:
        return log_likelihood(leaves) - entropy_of_paths(whole.with_unconstrained(leaves), x, LENGTHS) / len(x)

    return BlockCase(
        id=f"em.hmm.surrogate-{kind}",
        block=RESPONSIBILITIES,
        parameters=lambda: leaves_of(model(kind, seed=3)),
        loss=lambda leaves: hmm.surrogate(whole.with_unconstrained(leaves), x, LENGTHS),
        blocked=lambda leaves: gradient_of(log_likelihood, leaves),
        opened=lambda leaves: gradient_of(less_entropy, leaves),
        tolerance=1e-12,
    )


BLOCK_CASES: list[BlockCase] = [case(kind) for kind in KINDS]


# --- against enumeration ----------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("lengths", [[6], [1], [2, 1], [3, 6, 1, 4]], ids=str)
def test_every_path(kind, lengths):
    parameters = model(kind)
    x = data(parameters, lengths)
    expected = enumerated(parameters, x, lengths)
    assert torch.allclose(hmm.log_likelihoods(parameters, x, lengths), expected.log_likelihoods, rtol=1e-13)
    assert max(differences(hmm.e_step(parameters, x, lengths), expected).values()) < 1e-12
    assert max(differences(hmm.posteriors(parameters, x, lengths), expected).values()) < 1e-12
    states, scores = hmm.viterbi(parameters, x, lengths)
    for part, path, score in zip(x.split(lengths), states.split(lengths), scores, strict=True):
        paths, joint = all_paths(parameters, part)
        assert path.tolist() == paths[joint.argmax()].tolist()
        assert torch.isclose(score, joint.max(), rtol=1e-13)


@every_kind
def test_forbidden_transitions_and_states(kind):
    free = model(kind)
    mask = torch.tensor([[False, False, True], [True, False, False], [True, True, False]])
    parameters = dataclasses.replace(
        free,
        log_start=torch.tensor([0.3, 0.7, 0.0], dtype=F64).log(),
        log_transition=free.log_transition.masked_fill(mask, -math.inf).log_softmax(1),
    )
    x = data(free, [6, 3])
    expected = enumerated(parameters, x, [6, 3])
    for found in (hmm.e_step(parameters, x, [6, 3]), hmm.posteriors(parameters, x, [6, 3])):
        assert max(differences(found, expected).values()) < 1e-12
        assert not found.transitions[mask].any()
    x = data(free, [60, 30])
    for _ in range(5):
        parameters, _ = hmm.em_step(parameters, x, [60, 30], prior=hmm.DirichletPrior(start=2.0, transition=2.0))
        assert (parameters.log_transition[mask] == -math.inf).all()
        assert parameters.log_start[2] == -math.inf
    slopes = gradient_of(
        lambda leaves: hmm.log_likelihood(parameters.with_unconstrained(leaves), x, [60, 30]),
        parameters.unconstrained(),
    )
    assert all(slope.isfinite().all() for slope in slopes.values())
    fitted = hmm.fit(parameters, x, [60, 30], max_iter=20, reg_covar=1e-3).parameters
    assert (fitted.log_transition[mask] == -math.inf).all()


# --- the block --------------------------------------------------------------------------------------------------------


@every_kind
def test_fishers_identity_by_the_fast_pass(kind):
    parameters, lengths = model(kind, k=4), [40, 1, 23]
    x = data(parameters, lengths)
    found = hmm.posteriors(parameters, x, lengths)
    leaves = model(kind, k=4).unconstrained()
    by_surrogate = gradient_of(
        lambda values: hmm.expected_log_joint(parameters.with_unconstrained(values), x, found) / len(x), leaves
    )
    by_recursion = gradient_of(
        lambda values: hmm.log_likelihood(parameters.with_unconstrained(values), x, lengths), leaves
    )
    assert relative_error(by_surrogate, by_recursion) < 1e-12


def test_slopes_of_the_forward_recursion_are_the_posteriors():
    parameters, lengths = model("diag", k=4), [30, 7]
    x = data(parameters, lengths)
    found = hmm.posteriors(parameters, x, lengths)
    log_prob = parameters.emissions.log_prob(x).requires_grad_()
    log_transition = parameters.log_transition.clone().requires_grad_()
    total = torch.zeros((), dtype=F64)
    for part in log_prob.split(lengths):
        forward = parameters.log_start + part[0]
        for row in part[1:]:
            forward = (forward[:, None] + log_transition).logsumexp(0) + row
        total = total + forward.logsumexp(0)
    states, transitions = torch.autograd.grad(total, [log_prob, log_transition])
    assert torch.allclose(found.states, states, rtol=1e-12, atol=1e-14)
    assert torch.allclose(found.transitions, transitions, rtol=1e-12)


@every_kind
def test_open_surrogate_is_likelihood_less_entropy_of_paths(kind):
    parameters = model(kind)
    x = data(parameters, LENGTHS)
    likelihood, entropy = hmm.log_likelihood(parameters, x, LENGTHS), entropy_of_paths(parameters, x, LENGTHS) / len(x)
    assert torch.isclose(hmm.surrogate(parameters, x, LENGTHS), likelihood - entropy, rtol=1e-12)
    assert entropy > 0.05
    program = functools.partial(hmm.surrogate, x=x, lengths=LENGTHS)
    leaves = parameters.unconstrained()
    blocked = gradient_of(lambda values: program(parameters.with_unconstrained(values)), leaves)
    with unblock(RESPONSIBILITIES):
        opened = gradient_of(lambda values: program(parameters.with_unconstrained(values)), leaves)
    assert relative_error(opened, blocked) > 0.05


def test_open_step_carries_the_gradient_of_the_em_map():
    parameters = model("diag")
    x = data(parameters, [12])
    leaves = parameters.unconstrained()

    def after(values: Mapping[str, Tensor]) -> Tensor:
        now = parameters.with_unconstrained(values)
        return hmm.m_step(now, x, hmm.e_step(now, x)).emissions.means.sum()

    leaf = leaves["means"].clone().requires_grad_()
    assert not torch.autograd.grad(after({**leaves, "means": leaf}), leaf)[0].any()
    with unblock(RESPONSIBILITIES):
        slopes = gradient_of(after, leaves)
    step, means = 1e-5, leaves["means"].clone()
    means[1, 0] += step
    upper = after({**leaves, "means": means})
    means[1, 0] -= 2 * step
    lower = after({**leaves, "means": means})
    assert slopes["means"][1, 0] == pytest.approx(float(upper - lower) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("kind", ["full", "categorical"])
def test_under_torch_func(kind):
    parameters = model(kind)
    x, leaves = data(parameters, LENGTHS), parameters.unconstrained()
    found = grad(lambda values: hmm.surrogate(parameters.with_unconstrained(values), x, LENGTHS))(leaves)
    expected = gradient_of(lambda values: hmm.log_likelihood(parameters.with_unconstrained(values), x, LENGTHS), leaves)
    assert relative_error(found, expected) < 1e-12


# --- the fast pass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 0, 1, 2, 7, 16], ids=lambda block: f"block-{block}")
@each("k", [1, 2, 5])
@each("lengths", [[1], [2], [1, 1], [33, 1, 17, 33, 2], [101], [64, 64, 130]], ids=str)
def test_fast_pass_is_the_plain_recursion(lengths, k, block, monkeypatch):
    _cut(monkeypatch, block)
    monkeypatch.setattr(plans, "_CUT_BYTES", {"cpu": 200 * k})  # so that blocks come in several chunks
    monkeypatch.setattr(recursions, "_KEPT_BYTES", {"cpu": 1000 * k})
    monkeypatch.setattr(_engine.Engine, "_run_slowly", None)
    parameters = model("diag", k=k)
    x = data(parameters, lengths)
    weight = torch.arange(1.0, 1 + len(lengths), dtype=F64)
    for options in ({}, {"sequence_weight": weight}):
        plain = hmm.e_step(parameters, x, lengths, **options)
        found = hmm.posteriors(parameters, x, lengths, **options)
        assert max(differences(found, plain).values()) < 1e-11
        expected = hmm.m_step(parameters, x, plain, reg_covar=1e-3)
        step, value = hmm.em_step(parameters, x, lengths, reg_covar=1e-3, **options)
        assert parameter_difference(step, expected) < 1e-11
        assert torch.isclose(value, hmm.log_likelihood(parameters, x, lengths, **options), rtol=1e-12)
    assert torch.isclose(
        hmm.total_log_likelihood(parameters, x, lengths), hmm.log_likelihoods(parameters, x, lengths).sum(), rtol=1e-12
    )


@every_kind
@pytest.mark.parametrize("narrow", [False, True])
def test_step_is_that_of_the_plain_twin(kind, narrow, monkeypatch):
    if narrow:
        monkeypatch.setattr("toolkit.em.hmm._emissions._NARROW", {F64: 0.0})
    monkeypatch.setattr("toolkit.em.hmm._emissions._TILE", 16)
    parameters, lengths = model(kind, k=4, d=3), [60, 9, 31]
    x = data(parameters, lengths)
    expected = hmm.m_step(parameters, x, hmm.e_step(parameters, x, lengths), reg_covar=1e-3)
    found, _ = hmm.em_step(parameters, x, lengths, reg_covar=1e-3)
    assert parameter_difference(found, expected) < 1e-11


@every_type
def test_float32_keeps_the_likelihood(kind, monkeypatch):
    parameters, lengths = model(kind, k=4, d=2), [600, 100, 1]
    x = data(parameters, lengths)
    expected, value = hmm.em_step(parameters, x, lengths)
    for block in (0, 64):
        _cut(monkeypatch, block)
        single, single_value = hmm.em_step(parameters.to(torch.float32), x.float(), lengths)
        assert single.log_transition.dtype == torch.float32
        assert abs(single_value - value) < 1e-5
        gap = hmm.log_likelihood(single.to(F64), x, lengths) - hmm.log_likelihood(expected, x, lengths)
        assert abs(gap) < 1e-5
        assert hmm.posteriors(parameters, x.float(), lengths).states.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.portable
def test_rounding_errors_do_not_multiply(monkeypatch):
    _cut(monkeypatch, 0)
    parameters = model("diag", k=4)
    x = data(parameters, [30000])
    sums = hmm.posteriors(parameters, x.float()).states.sum(1)
    # What 64 steps between two corrections can add up to. Found: 1.3e-6 to 1.7e-6; without corrections, 2e-5.
    assert (sums - 1).abs().max() < recursions._CORRECT * torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize(("lengths", "is_chain"), [([200], True), ([250] * 200, False), ([100_000], False)], ids=str)
def test_few_steps_are_a_chain(lengths, is_chain):
    assert _chain.is_short(lengths, 4) == is_chain


def test_a_chain_is_in_float64():
    parameters = model("diag")
    x = data(parameters, [150, 50]).float()
    expected = hmm.posteriors(parameters, x.double(), [150, 50])
    found = hmm.posteriors(parameters.to(torch.float32), x, [150, 50])
    assert found.states.dtype == found.start.dtype == torch.float32
    # Rounded once, with the parameters rounded before.
    assert max(differences(found, expected).values()) < 1e-4


@every_kind
def test_fits_of_few_steps_are_those_of_the_plan(kind, monkeypatch):
    parameters = model(kind, k=4)
    x = data(model(kind, k=4, seed=2), [150, 1, 70])
    options = {"accelerate": "none", "tol": 0.0, "max_iter": 10, "reg_covar": 1e-3}
    found = hmm.fit(parameters, x, [150, 1, 70], **options)
    _cut(monkeypatch, 0)
    expected = hmm.fit(parameters, x, [150, 1, 70], **options)
    # Ten steps multiply the rounding of one.
    assert parameter_difference(found.parameters, expected.parameters) < 1e-9
    assert np.allclose(found.history, expected.history, rtol=1e-12)


def test_blocks_that_do_not_meet_are_repeated(monkeypatch):
    parameters = model("diag", k=3)
    x = data(parameters, [60])
    transfer = recursions._log_transfer
    _cut(monkeypatch, 8)
    monkeypatch.setattr(recursions, "_log_transfer", lambda *a: transfer(*a) + torch.arange(3.0, dtype=F64) / 1e6)
    found = hmm.posteriors(parameters, x)
    assert max(differences(found, hmm.e_step(parameters, x)).values()) < 1e-11


@pytest.mark.parametrize("block", [None, 0, 4])
def test_a_state_that_is_improbable_for_one_step(block, monkeypatch):
    """A hundred nats against the state that all other steps ask for, and no way back to it."""
    _cut(monkeypatch, block)
    monkeypatch.setattr(_engine.Engine, "_run_slowly", None)
    emissions = hmm.GaussianEmissions.from_covariances(
        means=torch.tensor([[0.0], [4.0]], dtype=F64), covariances=torch.ones(2, dtype=F64), covariance_type="spherical"
    )
    parameters = hmm.HMMParameters.of(
        start=torch.tensor([0.9, 0.1], dtype=F64),
        transition=torch.tensor([[0.9, 0.1], [0.0, 1.0]], dtype=F64),
        emissions=emissions,
    )
    x = torch.zeros(30, 1, dtype=F64)
    x[9] = 27.0
    found, plain = hmm.posteriors(parameters, x), hmm.e_step(parameters, x)
    assert plain.states[9, 0] > 0.99
    assert max(differences(found, plain).values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[400], [5, 400]], ids=str)
@pytest.mark.parametrize("block", [None, 0, 16])
def test_a_path_that_was_given_up_and_comes_back(lengths, block, monkeypatch):
    """State 0 looks hopeless for so long that its probability is below any number; then only it explains the rest."""
    _cut(monkeypatch, block)
    emissions = hmm.GaussianEmissions.from_covariances(
        means=torch.tensor([[0.0], [4.0]], dtype=F64),
        covariances=torch.ones(2, dtype=F64),
        covariance_type="spherical",
    )
    parameters = hmm.HMMParameters.of(
        start=torch.tensor([1.0, 0.0], dtype=F64),
        transition=torch.tensor([[0.9, 0.1], [0.0, 1.0]], dtype=F64),
        emissions=emissions,
    )
    x = torch.cat([torch.full((150, 1), 4.0, dtype=F64), torch.full((250, 1), 0.1, dtype=F64)])
    x = torch.cat([torch.zeros(sum(lengths) - 400, 1, dtype=F64), x])
    engine = _engine.Engine(parameters, x, lengths, None)
    logs, emit = (parameters.log_start, parameters.log_transition), engine._whole.prepared.begin(emissions).emit
    if block is None:
        fast = engine._whole.chain.forward_backward(*logs, emit, consume=lambda *_: None, weights=None)
        assert not fast.sound.any()
    else:
        fast = recursions.forward_backward(*logs, engine._whole.fast, emit, consume=lambda *_: None)
        assert fast.sound.tolist() == [True] * (len(lengths) - 1) + [False]
    found, plain = hmm.posteriors(parameters, x, lengths), hmm.e_step(parameters, x, lengths)
    assert max(differences(found, plain).values()) < 1e-9
    assert found.states[-1, 0] > 0.99
    step, _ = hmm.em_step(parameters, x, lengths, reg_covar=1e-3)
    assert parameter_difference(step, hmm.m_step(parameters, x, plain, reg_covar=1e-3)) < 1e-9
    assert torch.isclose(hmm.total_log_likelihood(parameters, x, lengths), plain.log_likelihoods.sum(), rtol=1e-12)


@pytest.mark.parametrize("block", [None, 0, 8])
def test_observations_that_look_impossible(block, monkeypatch):
    _cut(monkeypatch, block)
    parameters = model("spherical", k=3, d=1)
    x = data(parameters, [60])
    x[20], x[40:43] = 1e4, -500.0
    assert parameters.emissions.log_prob(x).max(1).values.min() < -1e5
    found, plain = hmm.posteriors(parameters, x), hmm.e_step(parameters, x)
    assert found.states.isfinite().all()
    assert torch.allclose(found.states, plain.states, atol=1e-9)
    assert torch.isclose(found.log_likelihoods, plain.log_likelihoods, rtol=1e-12).all()


def test_data_that_no_path_explains():
    parameters = hmm.HMMParameters.of(
        start=torch.tensor([1.0, 0.0], dtype=F64),
        transition=torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=F64),
        emissions=hmm.CategoricalEmissions(log_probabilities=torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64).log()),
    )
    x = torch.tensor([1, 0, 1, 1, 0])
    assert hmm.log_likelihoods(parameters, x, [3, 2]).tolist() == [-math.inf, math.log(0.5)]
    found = hmm.posteriors(parameters, x, [3, 2])
    assert found.log_likelihoods.tolist() == [-math.inf, pytest.approx(math.log(0.5))]
    assert found.states[3:].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert hmm.viterbi(parameters, x, [3, 2])[1].tolist() == [-math.inf, pytest.approx(math.log(0.5))]
    with pytest.raises(ValueError, match="should be finite"):
        hmm.fit(parameters, x, [3, 2])


@pytest.mark.slow
def test_a_million_steps_in_bounded_memory():
    k, n = 8, 10**6
    parameters = model("diag", k=k, d=1)
    x = torch.randn(n, 1, generator=seeded(), dtype=F64)
    live = LiveBytes()
    with live:
        _, value = hmm.em_step(parameters, x)
    assert math.isfinite(value)
    # The data's copy and the order of its steps, emissions or their parts, a chunk: less than twice (N, K) numbers.
    assert live.peak < 2 * n * k * 8 < n * k * k * 8 / 3


def test_many_states_are_cut_for_memory_alone(monkeypatch):
    assert not plans.plan([3000], 60).chains
    monkeypatch.setattr(plans, "_WHOLE_BYTES", 8 * 60 * 2999)
    assert not plans.plan([2999], 60).chains
    assert plans.plan([3000], 60).chains


@pytest.mark.parametrize("block", [None, 0, 2, 5, 16])
@pytest.mark.parametrize("lengths", [[1], [2, 1], [40, 17, 40, 3]], ids=str)
def test_best_paths_in_blocks(lengths, block):
    parameters = model("categorical", k=4)
    x = data(parameters, lengths)
    log_prob = parameters.emissions.log_prob(x)
    states, scores = best_paths(
        parameters.log_start,
        parameters.log_transition,
        lambda plan: lambda chunk, begin, end: log_prob[plan.chunks[chunk].steps[begin:end]].mT,
        lengths,
        block=block,
    )
    for path, score, b in zip(states.split(lengths), scores, log_prob.split(lengths), strict=True):
        best = parameters.log_start + b[0]
        for row in b[1:]:
            best = (best[:, None] + parameters.log_transition).max(0).values + row
        own = parameters.log_start[path[0]] + b[torch.arange(len(b)), path].sum()
        own = own + parameters.log_transition[path[:-1], path[1:]].sum()
        assert torch.isclose(score, best.max(), rtol=1e-13)
        assert torch.isclose(own, score, rtol=1e-13)


@pytest.mark.parametrize("block", [0, 4])
def test_tied_paths_are_still_paths(block):
    half = torch.full((2,), 0.5, dtype=F64).log()
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64).log()
    states, scores = best_paths(
        half, swap, lambda _: lambda _, begin, end: torch.zeros(2, end - begin, dtype=F64), [21], block=block
    )
    assert (states.diff().abs() == 1).all()
    assert scores.tolist() == [math.log(0.5)]


# --- peers and books --------------------------------------------------------------------------------------------------


def test_umbrellas():
    """The example of Wikipedia's page on the forward-backward algorithm; its numbers have four digits."""
    weather = hmm.HMMParameters.of(
        start=torch.tensor([0.5, 0.5], dtype=F64),
        transition=torch.tensor([[0.7, 0.3], [0.3, 0.7]], dtype=F64),
        emissions=hmm.CategoricalEmissions(log_probabilities=torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64).log()),
    )
    x = torch.tensor([0, 0, 1, 0, 0])
    expected = torch.tensor([0.8673, 0.8204, 0.3075, 0.8204, 0.8673], dtype=F64)
    for found in (hmm.e_step(weather, x), hmm.posteriors(weather, x)):
        assert torch.allclose(found.states[:, 0], expected, atol=5e-5)
        assert found.log_likelihoods.item() == pytest.approx(-3.3725, abs=5e-5)
    states, score = hmm.viterbi(weather, x)
    assert states.tolist() == [0, 0, 1, 0, 0]
    assert score.item() == pytest.approx(-4.4590, abs=5e-5)


def test_healthy_or_fever():
    """The example of Wikipedia's page on the Viterbi algorithm: healthy, healthy, fever, with probability .01512."""
    doctor = CategoricalHMM(2)
    doctor.startprob_, doctor.transmat_ = [0.6, 0.4], [[0.7, 0.3], [0.4, 0.6]]
    doctor.emissionprob_ = [[0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]
    score, states = doctor.decode([[0], [1], [2]])
    assert states.tolist() == [0, 0, 1]
    assert math.exp(score) == pytest.approx(0.01512, abs=1e-12)


def test_rainy_or_sunny():
    weather = CategoricalHMM(2)
    weather.startprob_, weather.transmat_ = [0.6, 0.4], [[0.7, 0.3], [0.4, 0.6]]
    weather.emissionprob_ = [[0.1, 0.4, 0.5], [0.6, 0.3, 0.1]]
    x = [[0], [1], [2]]
    for algorithm in ("viterbi", "map"):
        assert weather.decode(x, algorithm=algorithm)[1].tolist() == [1, 0, 0]
    expected = [[0.23170303, 0.76829697], [0.62406281, 0.37593719], [0.86397706, 0.13602294]]
    assert np.allclose(weather.predict_proba(x), expected, atol=1e-8)


def peer(kind: str, parameters: hmm.HMMParameters, **options):
    """Return hmmlearn's estimator at these parameters, without its priors."""
    peers = pytest.importorskip("hmmlearn.hmm")
    if kind == "categorical":
        found = peers.CategoricalHMM(parameters.n_states, init_params="", **options)
        found.emissionprob_ = array(parameters.emissions.log_probabilities.exp())
    else:
        found = peers.GaussianHMM(
            parameters.n_states, kind, init_params="", covars_prior=0, covars_weight=0, min_covar=0, **options
        )
        found.means_ = array(parameters.emissions.means)
        found.covars_ = array(parameters.emissions.covariances)
    found.startprob_, found.transmat_ = array(parameters.log_start.exp()), array(parameters.log_transition.exp())
    return found


@every_kind
def test_posteriors_are_hmmlearns(kind):
    parameters, lengths = model(kind, k=4), [50, 1, 200, 7]
    x = data(parameters, lengths)
    theirs = peer(kind, parameters, implementation="scaling")
    inputs = array(x) if x.ndim == 2 else array(x[:, None])
    score, states = theirs.score_samples(inputs, lengths)
    found = hmm.posteriors(parameters, x, lengths)
    assert np.allclose(array(found.states), states, rtol=0, atol=1e-12)
    assert float(found.log_likelihoods.sum()) == pytest.approx(score, rel=1e-12)
    best, path = theirs.decode(inputs, lengths)
    ours, scores = hmm.viterbi(parameters, x, lengths)
    assert float(scores.sum()) == pytest.approx(best, rel=1e-12)
    if kind != "categorical":  # where paths tie
        assert array(ours).tolist() == path.tolist()


@pytest.mark.parametrize("kind", ["diag", "spherical", "categorical"])
def test_fits_are_hmmlearns(kind):
    parameters, lengths, steps = model(kind, k=3), [80, 1, 120], 5
    x = data(parameters, lengths, seed=4)
    begin = model(kind, k=3, seed=7)
    theirs = peer(kind, begin, n_iter=steps + 1, tol=-math.inf)
    theirs.fit(array(x) if x.ndim == 2 else array(x[:, None]), lengths)
    found = hmm.fit(begin, x, lengths, accelerate="none", tol=0, max_iter=steps)
    assert np.allclose(np.array(found.history) * len(x), list(theirs.monitor_.history)[: steps + 1], rtol=1e-10)


@every_type
def test_equal_rows_are_a_mixture(kind):
    chain = model(kind)
    chain = dataclasses.replace(chain, log_transition=chain.log_start.expand(3, 3).clone())
    mixture = GaussianParameters(
        log_weights=chain.log_start,
        means=chain.emissions.means,
        precisions_cholesky=chain.emissions.precisions_cholesky,
        covariance_type=kind,
    )
    x = data(model(kind), [80])
    assert torch.isclose(hmm.log_likelihood(chain, x), mixture_log_likelihood(mixture, x), rtol=1e-13)
    responsibilities, _ = mixture_e_step(mixture, x)
    assert torch.allclose(hmm.posteriors(chain, x).states, responsibilities, atol=1e-13)
    expected = mixture_m_step(x, responsibilities, covariance_type=kind)
    found, _ = hmm.em_step(chain, x)
    assert torch.allclose(found.emissions.means, expected.means, rtol=1e-11)
    assert torch.allclose(found.emissions.precisions_cholesky, expected.precisions_cholesky, rtol=1e-11, atol=1e-12)


# --- Baum-Welch -------------------------------------------------------------------------------------------------------


@every_kind
def test_m_step_is_a_stationary_maximum(kind):
    before = model(kind)
    x = data(before, [60, 20])
    found = hmm.posteriors(before, x, [60, 20])
    after = hmm.m_step(before, x, found)
    leaves = after.unconstrained()

    def q(values: Mapping[str, Tensor]) -> Tensor:
        return hmm.expected_log_joint(after.with_unconstrained(values), x, found) / len(x)

    assert all(slope.abs().max() < 1e-12 for slope in gradient_of(q, leaves).values())
    for seed in range(10):
        nearby = {
            name: leaf + 0.05 * torch.randn(leaf.shape, generator=seeded(seed), dtype=F64)
            for name, leaf in leaves.items()
        }
        assert q(nearby) < q(leaves)


@every_kind
@pytest.mark.parametrize("prior", [None, hmm.DirichletPrior(start=1.5, transition=2.0, emission=1.3)], ids=["", "MAP"])
def test_likelihood_never_falls(kind, prior):
    for seed in range(22):
        k, lengths = 1 + seed % 3, [[80, 32], [120], [2, 1, 100]][seed % 3]
        x = data(model(kind, k=4, seed=100 + seed), lengths, seed=seed)
        now, before = model(kind, k=k, seed=seed, apart=1.0), -math.inf
        for _ in range(8):
            after, value = hmm.em_step(now, x, lengths, prior=prior)
            objective = float(value) + (float(prior.log_density(now)) / len(x) if prior else 0.0)
            assert objective >= before - 1e-12 * abs(objective)
            now, before = after, objective


@every_kind
@pytest.mark.parametrize("letters", ["s", "t", "e", "m", "c", "st", "tm"])
def test_each_set_of_parameters_climbs_by_itself(kind, letters):
    if kind == "categorical" and set(letters) & set("mc"):
        pytest.skip("symbols have no means")
    x, begin = data(model(kind), [70, 30]), model(kind, seed=5)
    found = hmm.fit(begin, x, [70, 30], update=letters, accelerate="none", tol=0, max_iter=6)
    assert all(b >= a for a, b in itertools.pairwise(found.history))
    assert found.n_iter >= 1
    moved = {
        name
        for name, leaf in found.parameters.unconstrained().items()
        if not torch.allclose(leaf, begin.unconstrained()[name], rtol=1e-12)
    }
    names = {"s": {"log_start"}, "t": {"log_transition"}, "m": {"means"}, "c": {"log_cholesky"}}
    names["e"] = {"log_probabilities"} if kind == "categorical" else {"means", "log_cholesky"}
    assert moved == set().union(*(names[letter] for letter in letters))


def test_best_covariances_about_means_that_stay():
    x, begin = data(model("full"), [90]), model("full", seed=5)
    found = hmm.posteriors(begin, x)
    step = hmm.fit(begin, x, update="c", accelerate="none", max_iter=1, tol=0).parameters
    difference = x - begin.emissions.means[1]
    expected = (found.states[:, 1, None] * difference).mT @ difference / found.states[:, 1].sum()
    assert torch.allclose(step.emissions.covariances[1], expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.portable
@pytest.mark.parametrize("kind", ["diag", "categorical"])
def test_acceleration_reaches_the_same_maximum_in_fewer_steps(kind):
    truth, lengths = model(kind, k=3, apart=0.7), [20] * 20
    x, begin = data(truth, lengths), model(kind, k=3, seed=1, apart=0.7)
    plain = hmm.fit(begin, x, lengths, accelerate="none", tol=1e-9, max_iter=3000)
    for method in ("anderson", "squarem"):
        found = hmm.fit(begin, x, lengths, accelerate=method, tol=1e-9, max_iter=3000)
        assert found.log_likelihood > plain.log_likelihood - 1e-9
        assert found.n_iter < plain.n_iter / 2
        assert all(b >= a for a, b in itertools.pairwise(found.history))


def test_a_weight_is_a_number_of_copies():
    parameters, lengths = model("tied"), [20, 1, 13]
    x = data(parameters, lengths)
    parts = x.split(lengths)
    copies = torch.cat([parts[0], parts[2], parts[2], parts[2]])
    weight = torch.tensor([1.0, 0.0, 3.0], dtype=F64)
    weighted = hmm.fit(parameters, x, lengths, sequence_weight=weight, max_iter=5, accelerate="none")
    copied = hmm.fit(parameters, copies, [20, 13, 13, 13], max_iter=5, accelerate="none")
    assert parameter_difference(weighted.parameters, copied.parameters) < 1e-11
    assert weighted.history == pytest.approx(copied.history, rel=1e-12)
    by_surrogate = hmm.surrogate(parameters, x, lengths, sequence_weight=weight)
    assert torch.isclose(by_surrogate, hmm.surrogate(parameters, copies, [20, 13, 13, 13]), rtol=1e-12)


def test_order_of_sequences_does_not_matter():
    parameters, lengths = model("full"), [20, 1, 33, 8]
    x = data(parameters, lengths)
    parts = x.split(lengths)
    order = [2, 0, 3, 1]
    turned = torch.cat([parts[i] for i in order])
    one = hmm.fit(parameters, x, lengths, max_iter=5, accelerate="none", reg_covar=1e-3)
    other = hmm.fit(parameters, turned, [lengths[i] for i in order], max_iter=5, accelerate="none", reg_covar=1e-3)
    assert parameter_difference(one.parameters, other.parameters) < 1e-9


def test_dirichlet_priors_are_counts():
    parameters = model("categorical", k=2)
    x = data(parameters, [30])
    prior = hmm.DirichletPrior(
        start=torch.tensor([3.0, 1.0], dtype=F64), transition=torch.tensor([[1.0, 5.0], [2.0, 1.5]]), emission=4.0
    )
    found, step = hmm.posteriors(parameters, x), hmm.em_step(parameters, x, prior=prior)[0]
    start = found.start + torch.tensor([2.0, 0.0])
    transitions = found.transitions + torch.tensor([[0.0, 4.0], [1.0, 0.5]])
    symbols = torch.stack([found.states[x == m].sum(0) for m in range(4)], 1) + 3.0
    assert torch.allclose(step.log_start.exp(), start / start.sum())
    assert torch.allclose(step.log_transition.exp(), transitions / transitions.sum(1, keepdim=True))
    assert torch.allclose(step.emissions.log_probabilities.exp(), symbols / symbols.sum(1, keepdim=True))


def test_a_state_that_is_never_visited_keeps_what_it_has():
    parameters = model("full")
    shut = dataclasses.replace(
        parameters,
        log_start=torch.tensor([0.5, 0.5, 0.0], dtype=F64).log(),
        log_transition=torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.7, 0.0], [0.2, 0.2, 0.6]], dtype=F64).log(),
    )
    x = data(parameters, [50])
    for step in (hmm.em_step(shut, x)[0], hmm.m_step(shut, x, hmm.e_step(shut, x))):
        assert torch.allclose(step.log_transition[2], shut.log_transition[2])
        assert torch.allclose(step.emissions.means[2], shut.emissions.means[2])
        assert torch.allclose(step.emissions.covariances[2], shut.emissions.covariances[2])
    for program in (hmm.log_likelihood, hmm.surrogate):
        means = shut.emissions.means.clone().requires_grad_()
        moved = dataclasses.replace(shut, emissions=dataclasses.replace(shut.emissions, means=means))
        with unblock(*([RESPONSIBILITIES] if program is hmm.surrogate else [])):
            (slope,) = torch.autograd.grad(program(moved, x), means)
        assert slope.isfinite().all()
        assert not slope[2].any()


@every_kind
def test_samples_have_the_model(kind):
    parameters = model(kind, k=3)
    x, states = hmm.sample(parameters, [1] * 3000 + [20000], generator=seeded(2))
    first = torch.cat([states[:3000], states[3000:3001]]).bincount(minlength=3) / 3001
    p = parameters.log_start.exp()
    assert ((first - p).abs() < 5 * (p * (1 - p) / 3001).sqrt()).all()
    path = states[3000:]
    counts = torch.zeros(3, 3, dtype=F64)
    counts.index_put_((path[:-1], path[1:]), torch.ones(len(path) - 1, dtype=F64), accumulate=True)
    p, visits = parameters.log_transition.exp(), counts.sum(1, keepdim=True)
    assert ((counts / visits - p).abs() < 5 * (p * (1 - p) / visits).sqrt()).all()
    one = torch.nn.functional.one_hot(states, 3).to(F64)
    estimated = parameters.emissions.m_step(x, one)
    if kind == "categorical":
        assert torch.allclose(
            estimated.log_probabilities.exp(), parameters.emissions.log_probabilities.exp(), atol=0.03
        )
    else:
        assert torch.allclose(estimated.means, parameters.emissions.means, atol=0.1)
        assert torch.allclose(estimated.covariances, parameters.emissions.covariances, rtol=0.1, atol=0.1)
    again = hmm.sample(parameters, [1] * 3000 + [20000], generator=seeded(2))
    assert torch.equal(again[0], x)


# --- the estimators ---------------------------------------------------------------------------------------------------


def quiet(estimator):
    """Return the estimator with a fit that does not warn of steps that did not suffice."""
    fit = estimator.fit

    def silent(*args, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return fit(*args, **options)

    estimator.fit = silent
    return estimator


@every_type
def test_estimator_finds_the_model(kind):
    truth, lengths = model(kind), [60] * 20
    means = torch.tensor([[0.0, 0.0], [8.0, 1.0], [-1.0, 9.0]], dtype=F64)
    truth = dataclasses.replace(truth, emissions=dataclasses.replace(truth.emissions, means=means))
    x, states = hmm.sample(truth, lengths, generator=seeded(3))
    found = GaussianHMM(3, kind, random_state=0, n_init=2).fit(array(x), lengths)
    assert found.converged_
    assert found.log_likelihood_ >= float(hmm.log_likelihood(truth, x, lengths)) - 1e-6
    order = [int(np.bincount(found.predict(array(x))[array(states == k)]).argmax()) for k in range(3)]
    assert sorted(order) == [0, 1, 2]
    assert np.allclose(found.means_[order], array(truth.emissions.means), atol=0.5)
    assert np.allclose(found.transmat_[np.ix_(order, order)], array(truth.log_transition.exp()), atol=0.1)
    assert found.score(array(x), lengths) == pytest.approx(len(x) * found.log_likelihood_, rel=1e-9)
    assert found.history_[-1] == found.log_likelihood_
    assert (np.diff(found.history_) >= 0).all()


def test_estimator_of_symbols():
    truth = model("categorical", k=2, d=3)
    x, _ = hmm.sample(truth, [50] * 20, generator=seeded(3))
    found = CategoricalHMM(2, random_state=0, n_init=2, tol=1e-4).fit(array(x[:, None]), [50] * 20)
    assert found.emissionprob_.shape == (2, 5)
    assert found.log_likelihood_ >= float(hmm.log_likelihood(truth, x, [50] * 20))
    drawn, states = found.sample(50, random_state=1)
    assert drawn.shape == (50, 1)
    assert states.shape == (50,)
    assert np.array_equal(found.predict(array(x)), found.predict(array(x[:, None])))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_answers_come_in_the_form_of_the_data(form, dtype):
    x = data(model("diag"), [60, 40]).to(dtype)
    x = array(x) if form == "numpy" else x
    found = GaussianHMM(2, random_state=0).fit(x, [60, 40])
    kind = np.ndarray if form == "numpy" else Tensor
    attributes = [found.means_, found.covars_, found.startprob_, found.transmat_, found.sample(5, random_state=0)[0]]
    for answer in attributes:
        assert isinstance(answer, kind)
        assert answer.dtype == (np.float64 if form == "numpy" else F64)
    assert isinstance(found.predict_proba(x, [60, 40]), kind)
    assert found.predict_proba(x, [60, 40]).dtype == x.dtype
    assert isinstance(found.predict(x), kind)
    assert found.predict(x).shape == (100,)


@pytest.mark.parametrize(("scale", "gap"), [(1.0, 1e-5), (1e30, 1.0), (1e-30, 1.0)])
def test_float32_attributes_score_as_the_fit(scale, gap):
    # float32 rounds the covariance of features that nearly agree to a singular one, and variances to 0 and infinity.
    x = torch.randn(80, 2, generator=seeded(3), dtype=F64)
    x = (scale * (x[:, :1] + gap * x)).float()
    found = GaussianHMM(2, "full", reg_covar=0, random_state=0).fit(x, [50, 30])
    assert found.means_.isfinite().all()
    assert found.covars_.isfinite().all()
    # Of the sums of 80 float32 numbers, whose features agree to 1e-5.
    assert found.score(x, [50, 30]) / 80 == pytest.approx(found.log_likelihood_, abs=1e-4)


def test_estimator_is_scikit_learns():
    one = GaussianHMM(3, "tied", tol=1e-3, random_state=4)
    other = clone(one)
    assert other.get_params() == one.get_params()
    assert other.set_params(n_components=2).n_components == 2
    assert "covariance_type='tied'" in repr(one)
    with pytest.raises(NotFittedError):
        one.predict(np.zeros((3, 1)))
    x = array(data(model("diag"), [80]))
    first, second = (GaussianHMM(3, random_state=4).fit(x) for _ in range(2))
    assert np.array_equal(first.means_, second.means_)
    assert clone(CategoricalHMM(2, n_features=4)).get_params()["n_features"] == 4


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
@pytest.mark.parametrize("letters", ["stmc", "s", "t", "m", "c", "st"])
def test_params_say_what_is_estimated(letters, kind):
    truth = model(kind)
    x = array(data(truth, [50, 40, 1]))
    found = quiet(GaussianHMM(3, kind, params=letters, init_params="", max_iter=5, accelerate="none", tol=0))
    begin = model(kind, seed=9)
    found.startprob_, found.transmat_ = array(begin.log_start.exp()), array(begin.log_transition.exp())
    found.means_, found.covars_ = array(begin.emissions.means), array(begin.emissions.covariances)
    before = {name: np.copy(getattr(found, name)) for name in ("startprob_", "transmat_", "means_", "covars_")}
    found.fit(x, [50, 40, 1])
    assert (np.diff(found.history_) >= 0).all()
    for letter, (name, value) in zip("stmc", before.items(), strict=True):
        assert np.allclose(getattr(found, name), value, rtol=1e-10) == (letter not in letters)


@pytest.mark.parametrize("accelerate", ["none", "anderson"])
def test_left_right_topology_stays(accelerate):
    transition, first = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]), np.array([1.0, 0.0, 0.0])
    x = np.random.default_rng(0).random((19, 2))
    found = quiet(GaussianHMM(3, init_params="mc", max_iter=30, reg_covar=1e-3, accelerate=accelerate, random_state=0))
    found.startprob_, found.transmat_ = first.copy(), transition.copy()
    found.fit(x, [10, 8, 1])
    assert (found.startprob_[first == 0] == 0).all()
    assert (found.transmat_[transition == 0] == 0).all()
    posteriors = found.predict_proba(x)
    assert np.allclose(posteriors.sum(1), 1)
    assert math.isfinite(found.decode(x)[0])


@every_type
@pytest.mark.parametrize("lengths", [[3, 4, 5], [10, 8, 1], [1, 1, 1, 1, 1, 1]], ids=str)
def test_short_sequences(lengths, kind):
    x = np.random.default_rng(0).random((sum(lengths), 3))
    found = quiet(GaussianHMM(3, kind, reg_covar=1e-2, max_iter=10, random_state=0)).fit(x, lengths)
    assert math.isfinite(found.score(x, lengths))
    assert np.allclose(found.predict_proba(x, lengths).sum(1), 1)


@every_type
def test_a_feature_without_variance(kind):
    x = np.column_stack([np.full(9, 715.0), np.arange(585.0, 0.0, -65.0), np.random.default_rng(0).normal(size=(9, 2))])
    found = quiet(GaussianHMM(3, kind, reg_covar=1e-3, max_iter=20, random_state=0)).fit(x)
    assert math.isfinite(found.score(x))
    assert np.allclose(found.means_[:, 0], 715.0)


def test_an_outlier_among_clusters():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(centre, 1, 100) for centre in (0, 5, 0, 5)])[:, None]
    x[40] = 10000
    found = quiet(GaussianHMM(2, "diag", init_params="", max_iter=100))
    found.startprob_, found.transmat_ = [0.0, 1.0], [[0.4, 0.6], [0.6, 0.4]]
    found.means_, found.covars_ = [[0.0], [5.0]], [[1.0], [1.0]]
    assert math.isfinite(found.fit(x).score(x))


def test_criteria_choose_the_number_of_states():
    truth = model("diag", k=2, d=2, apart=4.0)
    x = array(data(truth, [50] * 9))
    fits = [quiet(GaussianHMM(k, random_state=0, n_init=2, tol=1e-4)).fit(x, [50] * 9) for k in (1, 2, 3, 4)]
    bics, aics = [fit.bic(x, [50] * 9) for fit in fits], [fit.aic(x, [50] * 9) for fit in fits]
    assert int(np.argmin(bics)) == 1
    assert int(np.argmin(aics)) >= 1
    # Two states: 1 start, 2 transitions, 4 means, 4 variances.
    assert bics[1] == pytest.approx(-2 * fits[1].score(x, [50] * 9) + 11 * math.log(450))
    assert aics[1] == pytest.approx(-2 * fits[1].score(x, [50] * 9) + 22)


@pytest.mark.parametrize(("kind", "count"), [("full", 23), ("tied", 17), ("diag", 20), ("spherical", 17)])
def test_number_of_parameters(kind, count):
    found = quiet(GaussianHMM(3, kind, max_iter=0, random_state=0)).fit(array(data(model(kind), [50])))
    assert found._n_parameters() == count


def test_zero_steps_set_the_start_and_priors_pull():
    x = array(data(model("diag"), [90]))
    begin = GaussianHMM(3, max_iter=0, random_state=0).fit(x)
    assert begin.n_iter_ == 0
    strong = 1e6 * np.array([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]]) + 1
    found = GaussianHMM(3, transmat_prior=strong, startprob_prior=[1e6, 2e6, 1e6], random_state=0).fit(x)
    assert np.allclose(found.transmat_, (strong - 1) / 1e6, atol=1e-3)
    assert np.allclose(found.startprob_, [0.25, 0.5, 0.25], atol=1e-3)


@pytest.mark.portable
def test_restarts_keep_the_best():
    x = array(data(model("categorical", k=3), [60] * 5))

    def likelihoods(n_init: int, seed: int) -> float:
        options = {"random_state": seeded(seed), "n_init": n_init, "max_iter": 20}
        return quiet(CategoricalHMM(3, **options)).fit(x, [60] * 5).log_likelihood_

    g = seeded(1)
    alone = [quiet(CategoricalHMM(3, random_state=g, max_iter=20)).fit(x, [60] * 5).log_likelihood_ for _ in range(4)]
    assert max(alone) > alone[0] + 1e-6
    assert likelihoods(4, 1) == pytest.approx(max(alone), abs=1e-9)  # of equal ones the first is kept


def test_a_fit_that_does_not_converge_says_so():
    x = array(data(model("diag", apart=0.5), [90]))
    with pytest.warns(ConvergenceWarning, match=r"did not converge in 2 steps\. More \(`max_iter`\)"):
        GaussianHMM(3, max_iter=2, tol=0.0, random_state=0).fit(x)


def test_stationary_distribution():
    found = CategoricalHMM(10)
    found.transmat_ = np.random.default_rng(0).dirichlet(np.ones(10), 10)
    stationary = found.get_stationary_distribution()
    assert stationary.sum() == pytest.approx(1)
    assert np.allclose(stationary @ found.transmat_, stationary, atol=1e-12)


def test_sampling_goes_on_from_a_state_and_needs_no_fit():
    found = GaussianHMM(2, "spherical")
    found.startprob_, found.transmat_ = [0.6, 0.4], [[0.4, 0.6], [0.9, 0.1]]
    found.means_, found.covars_ = [[3.0], [5.0]], [4.0, 3.0]
    x, states = found.sample(1000, random_state=0)
    assert x.shape == (1000, 1)
    _, later = found.sample(10, random_state=1, currstate=int(states[-1]))
    assert later[0] == states[-1]
    assert x[states == 1].std() == pytest.approx(math.sqrt(3), rel=0.1)
    with pytest.raises(ValueError, match="`first` should be 1 states from 0 to 1"):
        found.sample(10, currstate=2)


def test_progress_and_randomness(capsys):
    x, calls = array(data(model("diag"), [60])), []
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = GaussianHMM(2, random_state=0, verbose=1, callback=lambda n, value: calls.append((n, value))).fit(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls[0] == (0, found.history_[0])
    assert "Start 1 of 1" in capsys.readouterr().out


GAUSSIAN = array(data(model("diag"), [30]))
BAD_FITS = {
    "components": (GaussianHMM(0), GAUSSIAN, None, ValueError, "`n_components` should be a positive integer. Found 0."),
    "type": (GaussianHMM(2, "tide"), GAUSSIAN, None, ValueError, "`covariance_type` should be one of.*Found 'tide'."),
    "params": (GaussianHMM(2, params="stx"), GAUSSIAN, None, ValueError, "`params` should have the letters s.*'stx'"),
    "unset": (GaussianHMM(2, init_params="mc"), GAUSSIAN, None, ValueError, "`startprob_` should be set"),
    "nan": (GaussianHMM(2), np.full((5, 2), np.nan), None, ValueError, "NaN"),
    "lengths": (GaussianHMM(2), GAUSSIAN, [10, 10], ValueError, "`lengths` should be positive integers that sum to 30"),
    "zero": (
        GaussianHMM(2),
        GAUSSIAN,
        [30, 0],
        ValueError,
        "`lengths` should be positive integers.*30, 0",
    ),
    "many": (GaussianHMM(31), GAUSSIAN, None, ValueError, "`n_components` should be at most 30"),
    "tol": (GaussianHMM(2, tol=-1.0), GAUSSIAN, None, ValueError, "`tol` should be finite and not negative"),
    "reg": (GaussianHMM(2, reg_covar=-1.0), GAUSSIAN, None, ValueError, "`reg_covar` should be finite and not"),
    "prior": (GaussianHMM(2, transmat_prior=0.0), GAUSSIAN, None, ValueError, "`transmat_prior` should be positive"),
    "floats": (
        CategoricalHMM(2),
        GAUSSIAN[:, :1],
        None,
        TypeError,
        "`X` should be integers, symbols from 0. Found float",
    ),
    "negative": (
        CategoricalHMM(2),
        np.array([[0], [-1]]),
        None,
        ValueError,
        "`X` should hold symbols from 0. Found -1",
    ),
    "columns": (
        CategoricalHMM(2),
        np.zeros((4, 2), int),
        None,
        ValueError,
        r"`X` should have shape \(N, 1\) or \(N,\)",
    ),
    "masked": (
        CategoricalHMM(2),
        np.ma.masked_array([[0], [1], [0]], mask=[[0], [1], [0]]),
        None,
        ValueError,
        "`X` should have no masked values. Found 1",
    ),
    "codes": (
        CategoricalHMM(2),
        np.array([[0], [10**9], [1]]),
        None,
        ValueError,
        r"Found a largest one of 1000000000: number the symbols by `np\.unique",
    ),
    "symbol": (CategoricalHMM(2, n_features=2), np.array([[0], [5]]), None, ValueError, "from 0 to 1. Found 0 to 5"),
}


@pytest.mark.parametrize("name", BAD_FITS)
def test_bad_fits(name):
    estimator, x, lengths, error, message = BAD_FITS[name]
    with pytest.raises(error, match=message):
        clone(estimator).fit(x, lengths)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("startprob_", [0.5, 0.6], "`startprob_` should be probabilities that sum to 1"),
        ("startprob_", [1.5, -0.5], "`startprob_` should be probabilities that sum to 1"),
        ("startprob_", [], r"`startprob_` should have shape \(2,\). Found \(0,\)"),
        ("transmat_", [[0.5, 0.5]], r"`transmat_` should have shape \(2, 2\). Found \(1, 2\)"),
        ("transmat_", [[1.0, 1.0], [0.0, 1.0]], "`transmat_` should be probabilities that sum to 1"),
        ("means_", [[1.0]], r"`means_` should have shape \(2, D\)"),
        ("means_", [[1.0], [math.nan]], r"`means_` should be finite. Found \[\[1.0\], \[nan\]\]"),
        ("startprob_", ["a", "b"], r"`startprob_` should be numbers. Found \['a', 'b'\]"),
        ("covars_", [1.0, 1.0], r"`covars_` should have shape \(2, 1\). Found \(2,\)"),
        ("covars_", [[1.0], [-1.0]], "positive definite"),
    ],
)
def test_bad_attributes(name, value, message):
    found = GaussianHMM(2)
    found.startprob_, found.transmat_ = [0.6, 0.4], [[0.4, 0.6], [0.9, 0.1]]
    found.means_, found.covars_ = [[3.0], [5.0]], [[4.0], [3.0]]
    assert math.isfinite(found.score([[1.0], [2.0]]))
    setattr(found, name, value)
    with pytest.raises(ValueError, match=message):
        found.score([[1.0], [2.0]])


X = data(model("diag"), [30])
BAD_CALLS = {
    "features": (lambda: hmm.log_likelihood(model("diag"), X[:, :1]), ValueError, r"`x` should have shape \(N, 2\)"),
    "no steps": (lambda: hmm.posteriors(model("diag"), X[:0]), ValueError, "at least one step"),
    "array": (lambda: hmm.e_step(model("diag"), array(X)), TypeError, "`x` should be a tensor. Found ndarray"),
    "lengths": (lambda: hmm.viterbi(model("diag"), X, [29]), ValueError, "sum to 30. Found .29., which sum to 29"),
    "symbols": (lambda: hmm.em_step(model("categorical"), X[:, 0]), TypeError, "int64 tensor of symbols"),
    "half": (lambda: hmm.em_step(model("diag"), X.half()), TypeError, "float32 or float64 tensor. Found torch.float16"),
    "weights": (
        lambda: hmm.em_step(model("diag"), X, sequence_weight=-torch.ones(1)),
        ValueError,
        "`sequence_weight` should be finite, not negative",
    ),
    "weight shape": (
        lambda: hmm.em_step(model("diag"), X, sequence_weight=torch.ones(2)),
        ValueError,
        r"`sequence_weight` should have shape \(1,\)",
    ),
    "prior shape": (
        lambda: hmm.fit(model("diag"), X, prior=hmm.DirichletPrior(transition=torch.ones(2, 2))),
        ValueError,
        r"`prior` should have concentrations that broadcast to \(3, 3\). Found \(2, 2\)",
    ),
    "prior": (
        lambda: hmm.DirichletPrior(start=torch.tensor([1.0, -1.0])),
        ValueError,
        r"`start` should be positive and finite. Found \[1.0, -1.0\]",
    ),
    "letters": (
        lambda: GaussianHMM(2, params=None).fit(array(X)),
        ValueError,
        r"`params` should have the letters s \(startprob\).*Found None",
    ),
    "algorithm": (
        lambda: GaussianHMM(2, algorithm="best").fit(array(X)),
        ValueError,
        "`algorithm` should be one of 'viterbi', 'map'. Found 'best'",
    ),
    "names as symbols": (
        lambda: CategoricalHMM(2).fit(["rain", "sun"]),
        TypeError,
        "`X` should be integers, symbols from 0. Found <U4",
    ),
    "no symbol": (lambda: CategoricalHMM(2).fit([]), ValueError, r"N at least 1. Found \(0,\)"),
    "text as weights": (
        lambda: GaussianHMM(2).fit(array(X), sequence_weight="a"),
        ValueError,
        "`sequence_weight` should be numbers. Found 'a'",
    ),
    "update": (lambda: hmm.fit(model("diag"), X, update="sx"), ValueError, "`update` should have the letters.*'sx'"),
    "shape": (
        lambda: dataclasses.replace(model("diag"), log_start=torch.zeros(2)),
        ValueError,
        r"`log_start` should have shape \(3,\). Found \(2,\)",
    ),
    "no symbols": (
        lambda: hmm.CategoricalEmissions(log_probabilities=torch.zeros(3)),
        ValueError,
        r"`log_probabilities` should have shape \(K, M\)",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@every_kind
def test_step_on_a_gpu_is_the_step_on_the_cpu(kind):
    parameters, lengths = model(kind, k=4), [3000, 100, 1]
    x = data(parameters, lengths)
    here, value = hmm.em_step(parameters, x, lengths)
    there, other = hmm.em_step(parameters.to(torch.device(ACCELERATOR)), x.to(ACCELERATOR), lengths)
    assert there.log_transition.device.type == ACCELERATOR
    assert abs(value - other.cpu()) < 1e-10
    assert parameter_difference(there.to(torch.device("cpu")), here) < 1e-9
