"""Arguments of the wrong kind are refused in a sentence that names them, by every function that takes a mixture."""

import pytest
import torch
from calls import COUNTS, MARKOV, MIXTURE, SAMPLES, STEPS

from toolkit import em
from toolkit.em import hmm

POSTERIORS = hmm.posteriors(MARKOV, STEPS)
ONLINE = em.online_start(MIXTURE)
PARSIMONIOUS = em.fit_parsimonious(SAMPLES, 2, "EII", generator=torch.Generator().manual_seed(0))

# Function, argument, and the sound arguments.
CALLS = [
    (em.impute, "parameters", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.impute, "x", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.draw_missing, "parameters", {"parameters": MIXTURE, "x": SAMPLES, "n_draws": 2}),
    (em.marginal_log_joint, "parameters", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.surrogate_missing, "parameters", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.em_step, "parameters", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.em_step_missing, "parameters", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.to_unconstrained, "parameters", {"parameters": MIXTURE}),
    (em.online_start, "parameters", {"parameters": MIXTURE}),
    (em.online_step, "state", {"state": ONLINE, "x": SAMPLES}),
    (em.incremental_start, "parameters", {"parameters": MIXTURE}),
    (em.incremental_step, "state", {"state": em.incremental_start(MIXTURE), "key": 0, "x": SAMPLES}),
    (em.log_density, "x", {"mixture": MIXTURE, "x": SAMPLES}),
    (em.icl, "mixture", {"mixture": MIXTURE, "x": SAMPLES, "n_parameters": 11}),
    (em.maximise_likelihood, "start", {"start": MIXTURE, "x": SAMPLES}),
    (em.spikes, "parameters", {"parameters": PARSIMONIOUS.parameters}),
    (hmm.viterbi, "parameters", {"parameters": MARKOV, "x": STEPS, "lengths": [6]}),
    (hmm.fit, "start", {"start": MARKOV, "x": STEPS}),
    (hmm.m_step, "parameters", {"parameters": MARKOV, "x": STEPS, "posteriors": POSTERIORS}),
    (hmm.m_step, "posteriors", {"parameters": MARKOV, "x": STEPS, "posteriors": POSTERIORS}),
    (hmm.expected_log_joint, "posteriors", {"parameters": MARKOV, "x": STEPS, "posteriors": POSTERIORS}),
    (hmm.sample, "parameters", {"parameters": MARKOV, "lengths": [2]}),
]


@pytest.mark.parametrize(
    ("function", "argument", "arguments"), CALLS, ids=[f"{call[0].__name__}-{call[1]}" for call in CALLS]
)
@pytest.mark.parametrize("wrong", ["mixture", None, [150], {"a": 3}], ids=["str", "none", "list", "dict"])
def test_an_argument_of_another_class_is_refused(function, argument, arguments, wrong):
    with pytest.raises(TypeError, match=f"^`{argument}` should be "):
        function(**{**arguments, argument: wrong})


@pytest.mark.parametrize(
    ("function", "argument", "arguments"),
    [call for call in CALLS if call[1] != "x"],
    ids=[f"{call[0].__name__}-{call[1]}" for call in CALLS if call[1] != "x"],
)
def test_samples_are_no_mixture(function, argument, arguments):
    with pytest.raises(TypeError, match=f"^`{argument}` should be .*Found an object of type Tensor"):
        function(**{**arguments, argument: COUNTS})


def test_the_result_of_a_fit_is_told_to_hold_the_mixture():
    found = em.fit(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match=r"Found an object of type Climb\. Pass its `parameters`\.$"):
        em.impute(found, SAMPLES)
    with pytest.raises(TypeError, match=r"Pass its `parameters`\.$"):
        em.spikes(PARSIMONIOUS)


@pytest.mark.parametrize(
    ("coordinates", "error", "found"),
    [
        ({"a": 3}, ValueError, r"should have log_weights, means, log_cholesky\. Found a\."),
        ({**em.to_unconstrained(MIXTURE), "means": [[0.0]]}, TypeError, r"\['means'\]` should be a tensor"),
        (SAMPLES, TypeError, "Found an object of type Tensor"),
    ],
    ids=["missing", "list", "tensor"],
)
def test_coordinates_that_are_not_complete_are_refused(coordinates, error, found):
    with pytest.raises(error, match=f"^`unconstrained.*{found}"):
        em.from_unconstrained(coordinates, "full")


@pytest.mark.parametrize("lengths", ["a", [2.5, 3.5], [torch.ones(2)], 6, [True] * 6], ids=str)
def test_lengths_that_are_not_integers_are_refused(lengths):
    with pytest.raises(ValueError, match=r"^`lengths` should be positive integers"):
        hmm.viterbi(MARKOV, STEPS, lengths)


def test_standard_errors_say_the_shape_of_all_samples():
    one = em.fit(SAMPLES, 1).parameters
    with pytest.raises(ValueError, match=r"^`x` should have shape \(N, 2\)\. Found \(6, 1\)\."):
        em.standard_errors(one, SAMPLES[:, :1])


WEIGHTED = {
    "log_likelihood": lambda weights: em.log_likelihood(MIXTURE, SAMPLES, weights),
    "e_step": lambda weights: em.e_step(MIXTURE, SAMPLES, weights)[1],
    "surrogate": lambda weights: em.surrogate(MIXTURE, SAMPLES, weights),
    "evidence_lower_bound": lambda weights: em.evidence_lower_bound(MIXTURE, SAMPLES, weights),
    "em_step": lambda weights: em.em_step(MIXTURE, SAMPLES, sample_weight=weights)[1],
    "fit": lambda weights: (
        em.fit(
            SAMPLES, 2, sample_weight=weights, reg_covar=0.1, generator=torch.Generator().manual_seed(0)
        ).log_likelihood
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_another_shape_are_refused_and_those_of_another_dtype_taken(name):
    """A column would be broadcast against the samples, to a wrong number."""
    n, call = len(SAMPLES), WEIGHTED[name]
    for shape in [(n, 1), (1, n), (1,), (n - 1,), ()]:
        with pytest.raises(ValueError, match=rf"`sample_weight` should have shape \({n},\)\. Found"):
            call(torch.ones(shape, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"`sample_weight` should be a tensor or None\. Found list"):
        call([1.0] * n)
    expected = call(torch.arange(1, n + 1).to(SAMPLES))
    for dtype in (torch.int64, torch.float32, torch.float64):
        assert float(call(torch.arange(1, n + 1, dtype=dtype))) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("function", [hmm.log_likelihood, hmm.e_step, hmm.surrogate])
@pytest.mark.parametrize("shape", [(2, 1), (1,), (3,)])
def test_weights_of_sequences_are_one_for_each(function, shape):
    with pytest.raises(ValueError, match=r"`sequence_weight` should have shape \(2,\)\. Found"):
        function(MARKOV, STEPS, [2, len(STEPS) - 2], sequence_weight=torch.ones(shape).to(STEPS))


@pytest.mark.parametrize("shape", [(len(SAMPLES), 1), (1,)])
def test_weights_of_incomplete_samples_are_one_for_each(shape):
    with pytest.raises(ValueError, match=r"`sample_weight` should have shape"):
        em.surrogate_missing(MIXTURE, SAMPLES, torch.ones(shape).to(SAMPLES))
