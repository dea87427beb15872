"""Arguments of the wrong kind are refused in a sentence that names them, by every function that takes a mixture."""

import pytest
import torch
from calls import COUNTS, MARKOV, MIXTURE, SAMPLES, STEPS
from each import each

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
@each("wrong", ["mixture", None, [150], {"a": 3}], ids=["str", "none", "list", "dict"])
def test_an_argument_of_another_class_is_refused(function, argument, arguments, wrong):
    with pytest.raises(TypeError, match=f"^`{argument}` should be "):
        function(**{**arguments, argument: wrong})


ADAM = {"start": MIXTURE, "x": SAMPLES, "optimizer": torch.optim.Adam, "steps": 1}
STATISTICS = em.Statistics.implied_by(MIXTURE)

# Function, and the sound arguments; the optional one is None in them.
OPTIONAL = [
    (em.fit, "prior", {"x": SAMPLES, "n_components": 2}),
    (em.fit, "group", {"x": SAMPLES, "n_components": 2}),
    (em.fit, "callback", {"x": SAMPLES, "n_components": 2}),
    (em.fit_missing, "prior", {"x": SAMPLES, "n_components": 2}),
    (em.fit_missing, "callback", {"x": SAMPLES, "n_components": 2}),
    (em.fit_family, "callback", {"family": em.StudentMixture, "x": SAMPLES, "n_components": 2}),
    (em.em_step_missing, "prior", {"parameters": MIXTURE, "x": SAMPLES}),
    (em.online_start, "prior", {"parameters": MIXTURE}),
    (em.incremental_start, "prior", {"parameters": MIXTURE}),
    (STATISTICS.maximise, "prior", {}),
    (em.maximise_likelihood, "callback", {"start": MIXTURE, "x": SAMPLES}),
    (em.gradient_em, "callback", ADAM),
    (em.select, "callback", {"x": SAMPLES, "n_components": [1], "models": ["EII"]}),
    (em.standard_errors, "natural", {"mixture": MIXTURE, "x": SAMPLES}),
    (hmm.fit, "prior", {"start": MARKOV, "x": STEPS}),
    (hmm.fit, "callback", {"start": MARKOV, "x": STEPS}),
    (hmm.em_step, "prior", {"parameters": MARKOV, "x": STEPS}),
    (hmm.m_step, "prior", {"parameters": MARKOV, "x": STEPS, "posteriors": POSTERIORS}),
]


@pytest.mark.parametrize(
    ("function", "argument", "arguments"), OPTIONAL, ids=[f"{call[0].__name__}-{call[1]}" for call in OPTIONAL]
)
@each("wrong", ["x", 3, [150], {"a": 3}], ids=["str", "int", "list", "dict"])
def test_an_optional_argument_of_another_class_is_refused(function, argument, arguments, wrong):
    with pytest.raises(TypeError, match=f"^`{argument}` should be .*Found"):
        function(**arguments, **{argument: wrong})


@pytest.mark.parametrize(
    ("estimator", "x"),
    [(em.GaussianMixture, SAMPLES), (em.GaussianHMM, STEPS), (em.CategoricalHMM, torch.tensor([0, 1, 0]))],
    ids=["mixture", "hmm", "symbols"],
)
def test_a_callback_of_an_estimator_is_a_function(estimator, x):
    with pytest.raises(TypeError, match=r"^`callback` should be a function of .*Found str"):
        estimator(2, callback="print").fit(x)


@pytest.mark.parametrize("name", ["warm_start", "missing"])
@pytest.mark.parametrize("wrong", ["False", None, 0.5])
def test_a_flag_that_is_no_truth_value_is_refused(name, wrong):
    """The text "False" would count as true."""
    with pytest.raises(ValueError, match=f"^`{name}` should be True or False. Found"):
        em.GaussianMixture(2, **{name: wrong}).fit(SAMPLES)


@pytest.mark.parametrize("name", ["weights_init", "means_init", "precisions_init"])
def test_a_start_that_is_not_of_numbers_is_refused(name):
    with pytest.raises(ValueError, match=rf"^`{name}` should be numbers\. Found 'kmeans'"):
        em.GaussianMixture(2, **{name: "kmeans"}).fit(SAMPLES)


@pytest.mark.parametrize("family", [em.StudentMixture, em.FactorAnalysers])
def test_half_precision_is_refused_by_families_of_real_samples(family):
    options = {"n_factors": 1} if family is em.FactorAnalysers else {}
    with pytest.raises(TypeError, match=r"^`x` should be a float32 or float64 tensor.*float16"):
        em.fit_family(family, SAMPLES.half(), 2, **options)


def test_statistics_are_scaled_by_numbers_and_merged_with_statistics():
    with pytest.raises(ValueError, match=r"^`factor` should be finite and not negative. Found 'x'"):
        STATISTICS.scaled("x")
    with pytest.raises(TypeError, match=r"^`other` should be of type Statistics"):
        STATISTICS.merged("x")


@pytest.mark.parametrize(
    ("weights", "found"),
    [(torch.ones(3), "should have shape"), (-torch.ones(len(SAMPLES)), "not negative"), ([1.0], "should be a tensor")],
    ids=["shape", "negative", "list"],
)
def test_weights_of_a_default_prior_are_those_of_its_samples(weights, found):
    """The mean and the covariance of negative weights are those of positive ones."""
    with pytest.raises((TypeError, ValueError), match=f"^`sample_weight` should.*{found}|^`sample_weight` {found}"):
        em.Prior.default(SAMPLES, 2, "full", sample_weight=weights)


@pytest.mark.parametrize("update", ["x", 3, None, ["s"]])
def test_kinds_of_parameters_to_update_are_letters(update):
    with pytest.raises(ValueError, match=r"^`update` should have the letters s, t, e, m, c. Found"):
        hmm.fit(MARKOV, STEPS, update=update)


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
