"""Random calls of every function of the gallery's rooms whose arguments are tensors and numbers.

A line of `TABLE` is a call: each tensor has a kind (see `KINDS`) and its dimensions, ``*`` for those of the batch, and
``!`` if it may have another shape. An action, ``a*<A``, is an integer below A.
"""

import importlib
import inspect
import re
from functools import partial

import pytest
import torch
from accelerator import ACCELERATOR
from each import each
from torch.utils._pytree import tree_leaves

from toolkit.bilevel import adapt, conjugate_gradient, newton_step, truncated_scan
from toolkit.curvature import (
    gaussian_kl_from_held,
    hessian_product,
    kl_from_held,
    natural_gradient,
    robust_loss,
    scale_gradient,
)
from toolkit.games import domain_adversarial_loss, gradient_penalty, zero_centred_penalty
from toolkit.policy_gradient import clipped_surrogate_pg_loss, importance_ratios, policy_gradient_loss, rpg_loss
from toolkit.quantization import (
    FiniteScalarQuantizer,
    ResidualVectorQuantizer,
    VectorQuantizer,
    leaky_integrate_and_fire,
    spike,
)
from toolkit.self_supervised import KeyQueue, dino_center, ema, moco_loss, sinkhorn
from toolkit.stochastic import leave_one_out
from toolkit.value_learning import categorical_q_learning, incremental_update, quantile_q_learning, td_learning
from toolkit.weighting import (
    BatchRenorm,
    adaptive_weight,
    circle_loss,
    consistency_loss,
    ema_normalize,
    focal_loss,
    held_sigmoid_focal_loss,
    importance_weighted_loss,
    mixstyle,
    sigmoid_focal_loss,
    sinkhorn_loss,
)

ROOMS = [
    *("quantization", "self_supervised", "value_learning", "policy_gradient", "stochastic", "games", "curvature"),
    "weighting",
]
SIZES = {"D": 5, "K": 4, "A": 6, "L": 2, "V": 3, "N": 7, "T": 8, "U": 9, "J": 10, "E": 2, "G": 4, "C": 3}
BATCHES = [(), (3,), (2, 3)]
TABLE = """
quantization.arctan_slope x:x*
quantization.averaged_codebook codebook:xK,D counts:+K z:x*,D indices:a*<K decay=0.7
quantization.codebook_loss z:x*,D codes:x*,D
quantization.codebook_perplexity indices:a*<K codebook_size=4
quantization.commitment_loss z:x*,D codes:x*,D
quantization.fast_sigmoid_slope x:x*
quantization.leaky_integrate_and_fire currents:+T,*! decay=0.9
quantization.nearest_codes z:x*,D! codebook:xK,D!
quantization.one_hot_ste probabilities:p*,D
quantization.rotation_trick z:x*,D codes:x*,D
quantization.round_ste x:x*
quantization.sigmoid_slope x:x*
quantization.sign_ste x:x*
quantization.spike x:x*
quantization.straight_through z:x*,D codes:x*,D
quantization.top_k_ste x:x*,D k=2
self_supervised.byol_loss prediction:x*,D projection:x*,D
self_supervised.data2vec_loss prediction:x*,D layers:xL,*,D!
self_supervised.dino_center center:xD teacher:xV,N,D!
self_supervised.dino_loss student:xV,N,D! teacher:xV,N,D! center:xD
self_supervised.enqueue queue:xK,D! keys:xN,D!
self_supervised.fixmatch_loss strong:x*,K weak:x*,K threshold=0.5
self_supervised.mean_teacher_loss student_logits:x*,K teacher_logits:x*,K
self_supervised.moco_loss q:xN,D k:xN,D queue:xK,D! temperature=0.5
self_supervised.negative_cosine_similarity p:x*,D z:x*,D
self_supervised.simsiam_loss p1:x*,D p2:x*,D z1:x*,D z2:x*,D
self_supervised.sinkhorn scores:xN,K epsilon=0.3
self_supervised.soft_label_loss strong:x*,K weak:x*,K temperature=0.7 threshold=0.3
self_supervised.swav_loss scores:xV,N,K epsilon=0.3
value_learning.categorical_double_q_learning q_atoms_tm1:sK q_logits_tm1:x*,A,K a_tm1:a*<A r_t:x* discount_t:u* \
q_atoms_t:sJ q_logits_t:x*,A,J q_t_selector:x*,A
value_learning.categorical_l2_project z_p:x*,J probs:p*,J z_q:sK!
value_learning.categorical_q_learning q_atoms_tm1:sK q_logits_tm1:x*,A,K a_tm1:a*<A r_t:x* discount_t:u* \
q_atoms_t:sJ q_logits_t:x*,A,J
value_learning.categorical_td_learning v_atoms_tm1:sK v_logits_tm1:x*,K r_t:x* discount_t:u* v_atoms_t:sJ \
v_logits_t:x*,J
value_learning.double_q_learning q_tm1:x*,A a_tm1:a*<A r_t:x* discount_t:u* q_t_value:x*,A q_t_selector:x*,A
value_learning.error_estimate_loss v_tm1:x* r_t:x* discount_t:u* v_t:x* h_tm1:x* rho_tm1:+*
value_learning.expected_sarsa q_tm1:x*,A a_tm1:a*<A r_t:x* discount_t:u* q_t:x*,A probs_a_t:p*,A
value_learning.gtd2_loss v_tm1:x* r_t:x* discount_t:u* v_t:x* h_tm1:x* rho_tm1:+*
value_learning.lambda_returns r_t:x*,T discount_t:u*,T v_t:x*,T lambda_:u*,T!
value_learning.n_step_bootstrapped_returns r_t:x*,T discount_t:u*,T v_t:x*,T n=2
value_learning.q_learning q_tm1:x*,A a_tm1:a*<A r_t:x* discount_t:u* q_t:x*,A
value_learning.quantile_q_learning dist_q_tm1:x*,K,A tau_q_tm1:uK a_tm1:a*<A r_t:x* discount_t:u* \
dist_q_t_selector:x*,J,A! dist_q_t:x*,J,A! huber_param=1.0
value_learning.quantile_regression_loss dist_src:x*,K tau_src:u*,K! dist_target:x*,J! huber_param=0.7
value_learning.sarsa q_tm1:x*,A a_tm1:a*<A r_t:x* discount_t:u* q_t:x*,A a_t:a*<A
value_learning.td_lambda v_tm1:x*,T r_t:x*,T discount_t:u*,T v_t:x*,T lambda_=0.7
value_learning.td_learning v_tm1:x* r_t:x* discount_t:u* v_t:x*
value_learning.tdc_loss v_tm1:x* r_t:x* discount_t:u* v_t:x* h_tm1:x* rho_tm1:+*
policy_gradient.actor_critic_loss logits_t:x*,A! a_t:a*<A v_t:x* g_t:x*
policy_gradient.clipped_surrogate_pg_loss prob_ratios_t:+* adv_t:x* epsilon=0.2
policy_gradient.dpg_loss a_t:x*,D dqda_t:x*,D dqda_clipping=0.5
policy_gradient.expected_policy_gradient_loss logits_t:x*,A q_t:x*,A baseline_t:x*
policy_gradient.gae_value_loss r_t:x*,T discount_t:u*,T lambda_=0.8 values:x*,U
policy_gradient.gaussian_log_prob a_t:x*,D mean_t:x*,D log_std_t:x*,D
policy_gradient.group_advantages rewards:x*,G baseline='mean' scale='std'
policy_gradient.grpo_loss log_prob_t:n*,G,T adv:x*,G old_log_prob_t:n*,G,T reference_log_prob_t:n*,G,T beta=0.3 \
mask_t:b*,G,T
policy_gradient.importance_ratios log_prob_t:n* old_log_prob_t:n*
policy_gradient.kl_penalty log_prob_t:n* reference_log_prob_t:n*
policy_gradient.off_policy_pg_loss log_prob_t:n* behaviour_log_prob_t:n* adv_t:x* clip_rho=1.5
policy_gradient.policy_gradient_loss logits_t:x*,A! a_t:a*<A adv_t:x* w_t:+*
policy_gradient.qpg_loss logits_t:x*,A q_t:x*,A
policy_gradient.reverse_kl_loss log_prob_t:n* reference_log_prob_t:n*
policy_gradient.rm_loss logits_t:x*,A q_t:x*,A
policy_gradient.rpg_loss logits_t:x*,A q_t:x*,A
policy_gradient.sac_actor_loss log_alpha:x log_prob_t:n* q_t:x*
policy_gradient.sac_critic_loss q_tm1:x* r_t:x* discount_t:u* q_t:x* log_prob_t:n* log_alpha:x
policy_gradient.sac_temperature_loss log_alpha:x log_prob_t:n*! target_entropy=-1.0
policy_gradient.td3_critic_loss q_tm1:xE,*! r_t:x* discount_t:u* q_t:xE,*!
policy_gradient.truncated_generalized_advantage_estimation r_t:x*,T discount_t:u*,T lambda_=0.8 values:x*,U
policy_gradient.vtrace v_tm1:x*,T v_t:x*,T r_t:x*,T discount_t:u*,T rho_tm1:+*,T
policy_gradient.vtrace_td_error_and_advantage v_tm1:x*,T v_t:x*,T r_t:x*,T discount_t:u*,T rho_tm1:+*,T
stochastic.dice_loss log_probs:nT,* costs:xT,* baselines:xT,*
stochastic.dreg_loss log_weights:xK,*
stochastic.enumerated_loss log_probs:n*,A losses:x*,A
stochastic.iwae_bound log_weights:xK,*
stochastic.iwae_loss log_weights:xK,*
stochastic.leave_one_out costs:xK,*
stochastic.magic_box log_prob:n*
stochastic.rebar_loss log_prob:n* cost:x* relaxed:x* conditional:x*
stochastic.score_function_loss log_prob:n* cost:x* baseline:x*!
stochastic.straight_through sample:b* mean:u*
stochastic.vimco_loss log_weights:xK,* log_probs:nK,*
stochastic.wake_loss log_weights:xK,* log_probs:nK,*
games.reverse_gradient input:x* scale=0.5
curvature.gaussian_kl_from_held mean:x*,D log_std:x*,D held_mean:x*,D held_log_std:x*,D
curvature.half_quadratic_loss residuals:x* kind='cauchy' scale=0.7
curvature.kl_from_held logits:x*,A held:x*,A
curvature.kl_to_held logits:x*,A held:x*,A
curvature.proximal_penalty point:x* anchor:x* step=0.5
curvature.reweighted_loss residuals:x* kind='welsch' scale=0.7
curvature.robust_loss residuals:x* kind='geman_mcclure' scale=0.7
curvature.robust_weights residuals:x* kind='huber' scale=0.7
curvature.scale_gradient input:x* scale=0.5
weighting.batch_renorm input:xN,C,T! running_mean:xC running_std:+C
weighting.beta_nll_loss input:x* target:x* var:+*
weighting.circle_loss embeddings:xN,D! labels:aN<K gamma=8.0
weighting.circle_loss_of_similarities positive:u*,J! negative:u*,K! gamma=8.0
weighting.ema_normalize input:x*! scale:+ decay=0.9
weighting.focal_loss logits:x*,A! labels:a*<A
weighting.gradnorm_loss weights:+K gradient_norms:+K losses:+K initial_losses:+K alpha=1.5
weighting.held_focal_loss logits:x*,A! labels:a*<A
weighting.held_sigmoid_focal_loss inputs:x* targets:b*
weighting.importance_weighted_loss losses:x*,K log_weights:x*,K
weighting.mixstyle input:xN,C,T! permutation:oN mixing:uN!
weighting.profiled_uncertainty_loss losses:+*,K
weighting.ratio_balanced_loss losses:+*,K
weighting.self_normalized_loss losses:+*,K
weighting.sigmoid_focal_loss inputs:x* targets:u*
weighting.sinkhorn_loss cost:+*,N,K! a:p*,N! b:p*,K! epsilon=0.5
weighting.sinkhorn_potentials cost:+*,N,K! a:p*,N! b:p*,K! epsilon=0.5 iterations=10
weighting.uncertainty_loss losses:+*,K! log_variances:xK
"""
KINDS = {
    "x": lambda shape, g: torch.randn(shape, generator=g).double(),  # any number
    "u": lambda shape, g: torch.rand(shape, generator=g).double() * 0.95,  # a share or a discount
    "+": lambda shape, g: torch.randn(shape, generator=g).double().exp(),
    "n": lambda shape, g: -torch.randn(shape, generator=g).double().exp(),  # a log-probability
    "p": lambda shape, g: torch.randn(shape, generator=g).double().softmax(-1),
    "s": lambda shape, g: (torch.rand(shape, generator=g).double() + 0.2).cumsum(-1) - 1.5,  # atoms
    "b": lambda shape, g: (torch.rand(shape, generator=g) > 0.3).double(),  # 0 or 1
    "o": lambda shape, g: torch.randperm(*shape, generator=g),
}
# Functions of models, games, distributions, generators and trees of tensors, which the tests of their rooms call.
OTHERS = {
    *("held_critic", "gumbel_softmax", "kmeans_codebook", "restarted_codebook", "smoothed_actions"),
    *("squashed_gaussian_sample", "relaxed_bernoulli", "implicit_sample", "path_log_prob", "wake_proposal_loss"),
    *("ema", "incremental_update", "adaptive_weight", "consistency_function", "consistency_loss", "karras_times"),
    *("gauss_newton_loss", "held_divergence", "hessian_product", "natural_gradient"),
    *("alternating_loss", "consensus_penalty", "dirac_gan", "discriminator_loss", "domain_adversarial_loss"),
    *("game_field", "generator_loss", "gradient_penalty", "lola_loss", "lookahead_loss", "simultaneous_loss"),
    *("symplectic_penalty", "zero_centred_penalty"),
}


def drawn(spec, batch, generator):
    """Return a random tensor, float64 or integers, of a kind and shape, ``x*,D`` say."""
    kind, dims = spec[0], spec[1:].removesuffix("!")
    dims, _, below = dims.partition("<")
    shape = [n for name in dims.split(",") if name for n in (batch if name == "*" else (SIZES[name],))]
    return torch.randint(SIZES[below], shape, generator=generator) if below else KINDS[kind](shape, generator)


def call(line, seed):
    """Return a function of the line's tensors, and the tensors."""
    name, *parts = line.split()
    room, function = name.split(".")
    numbers = {key: eval(value) for key, _, value in (part.partition("=") for part in parts if "=" in part)}
    generator = torch.Generator().manual_seed(seed)
    specs = dict(part.split(":") for part in parts if "=" not in part)
    tensors = {key: drawn(spec, BATCHES[seed % 3], generator) for key, spec in specs.items()}
    return partial(getattr(importlib.import_module(f"toolkit.{room}"), function), **numbers), tensors, specs


def outcome(function, tensors):
    """Return the results that are numbers, and the gradient of a weighted sum of them by each tensor."""
    leaves = {key: t.clone().requires_grad_() if t.is_floating_point() else t for key, t in tensors.items()}
    results = [r for r in tree_leaves(function(**leaves)) if r.is_floating_point()]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    sums = [
        (r.double() * torch.linspace(0.5, 1.5, r.numel(), device=r.device).view(r.shape)).sum()
        for r in results
        if r.requires_grad
    ]
    gradients = torch.autograd.grad(sums, wanted, allow_unused=True, materialize_grads=True) if sums else ()
    return [*(r.detach() for r in results), *gradients]


def floats(change, tensors):
    return {key: change(t) if t.is_floating_point() else t for key, t in tensors.items()}


def moved_by(eps, generator, tensor):
    return tensor * (1 + eps * (2 * torch.rand(tensor.shape, generator=generator) - 1))


LINES = TABLE.replace("\\\n", "").strip().splitlines()
every_line = each("line", LINES, ids=lambda line: line.split()[0])


def test_every_function_has_a_call():
    rooms = [importlib.import_module(f"toolkit.{room}") for room in ROOMS]
    functions = {name for room in rooms for name in room.__all__ if inspect.isroutine(getattr(room, name))}
    assert functions == {line.split()[0].split(".")[1] for line in LINES} | OTHERS


@every_line
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_lower_precision_is_off_by_few_roundings(line, dtype):
    """The error is a few roundings of the result, or what relative errors of some eps in the input would cause."""
    for seed in range(3):
        function, tensors, _ = call(line, seed)
        if dtype != torch.float32 and function.func.__name__ == "averaged_codebook":
            continue  # refuses half precision
        low = floats(lambda t: t.to(dtype), tensors)
        exact = floats(torch.Tensor.double, low)
        eps = torch.finfo(dtype).eps
        expected = outcome(function, exact)
        moved = [
            outcome(function, floats(partial(moved_by, eps, torch.Generator().manual_seed(i)), exact)) for i in range(2)
        ]
        for i, (found, right) in enumerate(zip(outcome(function, low), expected, strict=True)):
            sensitivity = max(((m[i] - right).abs().max().item() for m in moved if right.numel()), default=0)
            bound = 16 * eps * (1 + right.abs().max().item()) + 16 * sensitivity
            assert (found.double() - right).abs().max().item() <= bound, (seed, i)


def wrong_shapes(tensor):
    """Yield a tensor in shapes that would broadcast against its own, or hold other entries."""
    yield tensor.unsqueeze(-1)
    yield tensor.unsqueeze(0)
    if tensor.ndim:
        yield tensor[0]
        yield tensor[:1]
        yield tensor[..., :1]


@every_line
def test_a_shape_that_does_not_fit_is_refused(line):
    for seed in range(3):
        function, tensors, specs = call(line, seed)
        for name in [name for name, spec in specs.items() if len(specs) > 1 and "!" not in spec]:
            for wrong in wrong_shapes(tensors[name]):
                with pytest.raises((ValueError, TypeError), match="should"):
                    function(**{**tensors, name: wrong})


@every_line
def test_a_tensor_of_another_kind_is_a_number_or_refused_by_name(line):
    """Integers and flags count as the numbers they are, where they are taken at all; complex numbers never are."""
    for seed in range(3):
        function, tensors, specs = call(line, seed)
        for name in [name for name, spec in specs.items() if "<" not in spec and spec[0] != "o"]:
            for kind in (torch.int64, torch.bool, torch.complex128):
                other = tensors[name].to(kind)
                try:
                    found = function(**{**tensors, name: other})
                except ValueError as error:
                    if not re.match(rf"`{name}` should be .* Found .*\.$", str(error)):
                        raise
                else:
                    linear = function.func is scale_gradient  # takes complex numbers as well
                    assert linear or not kind.is_complex
                    right = function(**{**tensors, name: other if linear else other.double()})
                    torch.testing.assert_close(found, right, check_dtype=False)


@every_line
def test_indices_out_of_range_are_refused_by_name(line):
    for seed in range(3):
        function, tensors, specs = call(line, seed)
        classes = {} if function.func is circle_loss else {n: SIZES[s[-1]] for n, s in specs.items() if s[-2:-1] == "<"}
        for name, below in classes.items():
            expected = function(**tensors)
            for kind in (torch.uint8, torch.int32):
                torch.testing.assert_close(function(**{**tensors, name: tensors[name].to(kind)}), expected)
            for wrong in (below, -1):
                indices = tensors[name].clone()
                indices.view(-1)[-1] = wrong
                with pytest.raises(
                    ValueError, match=f"`{name}` should be at least 0 and below {below}. Found {wrong}."
                ):
                    function(**{**tensors, name: indices})


@every_line
def test_dimensions_without_entries_have_an_answer_or_are_refused(line):
    for seed in range(3):
        function, tensors, specs = call(line, seed)
        for size in {dim for spec in specs.values() for dim in re.findall(r"[A-Z]", spec[1:].partition("<")[0])}:
            empty = dict(tensors)
            for key, spec in specs.items():
                dims = spec[1:].partition("<")[0].removesuffix("!").split(",")
                if size in dims:
                    dim = dims.index(size) - len(dims) if "*" not in dims[dims.index(size) :] else dims.index(size)
                    empty[key] = tensors[key].narrow(dim, 0, 0)
            try:
                function(**empty)
            except ValueError as error:
                if " should " not in str(error):
                    raise


@every_line
def test_strides_change_nothing_and_nothing_is_changed(line):
    for seed in range(3):
        function, tensors, _ = call(line, seed)
        before = {key: t.clone() for key, t in tensors.items()}
        strided = {key: torch.stack([t, t], -1)[..., 0] for key, t in tensors.items()}
        torch.testing.assert_close(outcome(function, strided), outcome(function, tensors))
        function(**tensors)
        assert all(torch.equal(t, before[key]) for key, t in tensors.items())


@every_line
def test_results_are_made_where_the_tensors_are(line):
    """A program on the meta device reads no value on the host and makes no tensor elsewhere."""
    for seed in range(3):
        function, tensors, _ = call(line, seed)
        found = tree_leaves(function(**tensors))
        empty = tree_leaves(function(**{key: t.to("meta") for key, t in tensors.items()}))
        assert [(t.shape, t.dtype, "meta") for t in found] == [(t.shape, t.dtype, t.device.type) for t in empty]
        with torch.device("meta"):
            assert all(t.device.type == "cpu" for t in tree_leaves(function(**tensors)))


@every_line
@pytest.mark.gpu
def test_an_accelerator_gives_the_same_gradients(line):
    for seed in range(2):
        function, tensors, _ = call(line, seed)
        there = outcome(function, {key: t.to(ACCELERATOR) for key, t in tensors.items()})
        assert {t.device.type for t in there} <= {ACCELERATOR}
        torch.testing.assert_close([t.cpu() for t in there], outcome(function, tensors))


# The value of an action that is illegal, or of a state that does not follow, counts 0: -inf as much as any number.
ILLEGAL = {
    "policy_gradient.expected_policy_gradient_loss": ["logits_t", "q_t"],
    "policy_gradient.qpg_loss": ["logits_t", "q_t"],
    "policy_gradient.rm_loss": ["logits_t", "q_t"],
    "policy_gradient.rpg_loss": ["logits_t", "q_t"],
    "self_supervised.dino_loss": ["teacher", "student"],
    "self_supervised.soft_label_loss": ["weak", "strong"],
    "value_learning.expected_sarsa": ["probs_a_t", "q_t"],
    "value_learning.double_q_learning": ["discount_t", "q_t_value"],
    "value_learning.expected_sarsa ": ["discount_t", "q_t"],
    "value_learning.q_learning": ["discount_t", "q_t"],
    "value_learning.quantile_q_learning": ["discount_t", "dist_q_t"],
    "value_learning.sarsa": ["discount_t", "q_t"],
    "value_learning.td_learning": ["discount_t", "v_t"],
    "weighting.importance_weighted_loss": ["log_weights", "losses"],
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_zero_times_minus_infinity_is_zero(name):
    """``-inf`` is compared with a finite number in its place: the other gradients are the same, its own is 0."""
    (line,) = [line for line in LINES if line.startswith(f"{name.strip()} ")]
    weight, value = ILLEGAL[name]
    for seed in (1, 2):
        function, tensors, _ = call(line, seed)
        ended = weight == "discount_t"
        tensors[weight][..., 0] = 0 if ended or weight == "probs_a_t" else -torch.inf
        results = []
        for filled in (-torch.inf, -50.0):
            place = (0, ...) if ended and seed == 1 else (..., 0)
            if ended and seed == 2:
                place = (slice(None), 0)
            tensors[value][place] = filled
            results.append(outcome(function, tensors))
        torch.testing.assert_close(*results)


# Arguments of which only the order counts, and a queue that is full of new keys.
WITHOUT_NUMBERS = {"q_t_selector", "dist_q_t_selector", "queue", "mask_t"}


@every_line
def test_missing_numbers_are_not_lost(line):
    """A loss that is finite beside a network that has diverged would hide it."""
    for seed in range(3):
        function, tensors, _ = call(line, seed)
        for name in [name for name, t in tensors.items() if t.is_floating_point() and name not in WITHOUT_NUMBERS]:
            try:
                found = tree_leaves(function(**{**tensors, name: torch.full_like(tensors[name], torch.nan)}))
            except ValueError as error:
                if not re.match(rf"`{name}` should", str(error)):
                    raise
            else:
                found = [result for result in found if isinstance(result, torch.Tensor) and result.is_floating_point()]
                assert not found or any(result.isnan().any() for result in found), name


def test_a_state_without_legal_actions_counts_until_the_episode_ends():
    zero = torch.zeros(2)
    found = td_learning(zero, zero, torch.tensor([0.0, 0.5]), torch.full((2,), -torch.inf))
    assert found.tolist() == [0, -torch.inf]


@every_line
def test_an_empty_batch_gives_no_nan_but_the_mean_of_nothing(line):
    function, tensors, specs = call(line, 1)
    empty = {key: t[:0] if specs[key].startswith("*", 1) else t for key, t in tensors.items()}
    try:
        results = outcome(function, empty)
    except ValueError as error:
        if "should have" not in str(error):
            raise
    else:
        assert not any(result.ndim and result.isnan().any() for result in results)


# Factors of inputs whose results are numbers of float16 as well.
FAR_FROM_ONE = {
    "policy_gradient.dpg_loss": {"a_t": 10.0, "dqda_t": 1e-3},
    "quantization.rotation_trick": {"z": 1e4, "codes": 1e4},
}


@pytest.mark.parametrize("name", FAR_FROM_ONE)
def test_numbers_far_from_one_keep_their_precision(name):
    (line,) = [line for line in LINES if line.startswith(f"{name} ")]
    for seed in range(3):
        function, tensors, _ = call(line, seed)
        low = {
            key: (t * FAR_FROM_ONE[name].get(key, 1)).half() if t.is_floating_point() else t
            for key, t in tensors.items()
        }
        for found, right in zip(
            outcome(function, low), outcome(function, floats(torch.Tensor.double, low)), strict=True
        ):
            bound = 64 * torch.finfo(found.dtype).eps * right.abs().max()  # at most 64 roundings in a row
            assert ((found.double() - right).abs() <= bound).all(), seed


def test_a_ratio_beyond_the_largest_number_is_clipped_without_nan():
    """A clipped objective has no gradient. That of the largest ratio is 0 as well, and not infinite times 0."""
    log_prob = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-100.0, -torch.inf, -1.0])
    for advantage, expected in ((1.0, -1.2), (0.0, 0.0)):
        loss = clipped_surrogate_pg_loss(importance_ratios(log_prob, old)[:2], torch.full((2,), advantage), 0.2)
        assert loss.item() == pytest.approx(expected)
        assert torch.autograd.grad(loss, log_prob)[0].tolist() == [0, 0, 0]


def test_a_baseline_of_the_others_is_not_lost_beside_a_large_cost():
    costs = torch.tensor([1e30, 1.0, 2.5, torch.inf])
    assert leave_one_out(costs[:3]).tolist() == pytest.approx([1.75, 5e29, 5e29])
    assert leave_one_out(costs)[3] == pytest.approx(1e30 / 3)


def test_the_best_quantiles_of_half_precision_are_chosen_in_float32():
    """Two means that are equal after rounding to 11 bits: the second is the larger one."""
    selector = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.001]]).half()
    label, zero, one = torch.tensor([[0.0, 1.0]]).half(), torch.tensor(0.0).half(), torch.tensor(1.0).half()
    loss = quantile_q_learning(
        label, torch.tensor([0.5]).half(), torch.tensor(0), zero, one, selector, label, huber_param=0
    )
    assert loss == 0.5


def test_neurons_of_half_precision_integrate_in_float32():
    """Currents of 1/1000 reach the threshold; the sum of bfloat16 numbers stays at 1/4."""
    spikes, potentials = leaky_integrate_and_fire(torch.full((1200,), 1e-3, dtype=torch.bfloat16), decay=1.0)
    assert spikes.sum() == 1
    assert (spikes.dtype, potentials.dtype) == (torch.bfloat16, torch.float32)


def test_an_infinite_logit_of_a_sure_decision_costs_nothing():
    x = torch.tensor([-torch.inf, torch.inf, 0.4], requires_grad=True)
    for loss in (sigmoid_focal_loss, held_sigmoid_focal_loss):
        found = loss(x, torch.tensor([0.0, 1.0, 1.0]), alpha=None)
        assert found[:2].tolist() == [0, 0]
        assert torch.autograd.grad(found.sum(), x)[0][:2].tolist() == [0, 0]


def test_padding_of_weight_zero_may_name_an_illegal_action():
    logits, one = torch.tensor([[0.2, 0.7], [-torch.inf, 0.3]], requires_grad=True), torch.ones(2)
    loss = policy_gradient_loss(logits, torch.tensor([1, 0]), 2 * one, torch.tensor([1.0, 0.0]))
    alone = policy_gradient_loss(logits[:1], torch.tensor([1]), one[:1])
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (loss, alone)))


def test_an_illegal_action_has_no_regret():
    logits, q = torch.tensor([0.2, -torch.inf, 0.7]), torch.tensor([1.0, 50.0, -0.3])
    torch.testing.assert_close(rpg_loss(logits, q), rpg_loss(logits[[0, 2]], q[[0, 2]]))


def test_keys_of_another_precision_are_taken():
    q, queue = (
        torch.eye(3, dtype=torch.float64),
        KeyQueue(4, 3, generator=torch.Generator().manual_seed(0))(torch.eye(3)),
    )
    torch.testing.assert_close(moco_loss(q, q, queue), moco_loss(q, q, queue.double()))


ONE, TWO = torch.ones(1), torch.ones(2, 3)
REFUSED = {
    "`teacher` should have outputs to average. Found shape (0, 3).": lambda: dino_center(TWO[0], TWO[:0]),
    "`scores` should have shape (samples, prototypes), not empty. Found (0, 3).": lambda: sinkhorn(TWO[:0]),
    "`input` should have entries. Found shape (0,).": lambda: ema_normalize(ONE[:0], ONE[0], decay=0.9),
    "`mixing` should have shape (1,). Found (3,).": lambda: mixstyle(TWO[None], torch.tensor([0]), TWO[0]),
    "`permutation` should be at least 0 and below 1. Found -1.": lambda: mixstyle(TWO[None], torch.tensor([-1]), 0.5),
    "`permutation` should be at least 0 and below 1. Found 5.": lambda: mixstyle(TWO[None], torch.tensor([5]), 0.5),
    "`q_logits_t` should be a tensor. Found list.": lambda: categorical_q_learning(
        ONE.new_tensor([0, 1]), TWO[:, :2], torch.tensor(0), ONE[0], ONE[0], ONE.new_tensor([0, 1]), [[0.0, 1.0]]
    ),
    "`permutation` should be a tensor of integers. Found torch.float32.": lambda: mixstyle(TWO[None], 0 * ONE, 0.5),
    "`labels` should be a tensor of integers. Found torch.float32.": lambda: focal_loss(TWO, ONE.expand(2)),
    "`logits` should be a floating-point tensor. Found torch.int64.": lambda: kl_from_held(TWO.long(), TWO),
    "`held_mean` should be a floating-point tensor. Found torch.int64.": lambda: gaussian_kl_from_held(
        ONE, ONE, ONE.long(), ONE
    ),
    "`residuals` should be a floating-point tensor. Found torch.int64.": lambda: robust_loss(
        ONE.long(), kind="huber", scale=1.0
    ),
    "`log_weights` should be a floating-point tensor. Found torch.int64.": lambda: importance_weighted_loss(
        ONE, ONE.long()
    ),
    "`cost` should be a floating-point tensor. Found torch.int64.": lambda: sinkhorn_loss(TWO.long(), epsilon=1.0),
    "`cost`, `a` and `b` should have leading dimensions that broadcast. Found [(2,), (3,), ()].": lambda: sinkhorn_loss(
        TWO[:, None], ONE.expand(3, 1), epsilon=1.0
    ),
    "`slope(x)` should have the shape of `x`, (1,). Found (2, 3).": lambda: spike(ONE, lambda x: TWO),
    "`indices` should be a tensor of integers. Found torch.float32.": lambda: FiniteScalarQuantizer([3]).codes_of(ONE),
    "`indices` should be a tensor of integers. Found list.": lambda: ResidualVectorQuantizer(1, 2, 3).codes_of([1]),
    "`indices` should be at least 0 and below 2. Found -1.": lambda: VectorQuantizer(3, 2).codes_of(torch.tensor([-1])),
    "`input` should be a floating-point tensor. Found torch.int64.": lambda: BatchRenorm(3).eval()(TWO.long()),
    "`teacher` should be a dict of tensors. Found list.": lambda: ema([ONE], [ONE], momentum=0.5),
    "`student['w']` should be a tensor. Found float.": lambda: ema({"w": ONE}, {"w": 1.0}, momentum=0.5),
    "`new_tensors` should be a dict of tensors. Found list.": lambda: incremental_update([ONE], [ONE], 0.5),
    "`parameters` should be a dict of tensors. Found list.": lambda: adapt(torch.sum, [ONE], steps=1, step_size=0.1),
    "`parameters` should have at least one tensor. Found none.": lambda: adapt(torch.sum, {}, steps=1, step_size=0.1),
    "`parameters['w']` should be a floating-point tensor. Found torch.int64.": lambda: adapt(
        torch.sum, {"w": ONE.long()}, steps=1, step_size=0.1
    ),
    "`residual` should return the shape of `solution`, (3,). Found ().": lambda: newton_step(torch.sum, TWO[0]),
    "`b` should be a floating-point tensor. Found torch.int64.": lambda: conjugate_gradient(torch.neg, ONE.long()),
    "`inputs` should have at least one time step. Found none.": lambda: truncated_scan(max, ONE, ONE[0], every=1),
    "`real` should have shape (N, ...). Found ().": lambda: gradient_penalty(torch.sum, ONE[0], ONE[0]),
    "`samples` should be a floating-point tensor. Found torch.int64.": lambda: zero_centred_penalty(
        torch.sum, ONE.long()
    ),
    "`source` and `target` should have shapes (N, D) and (M, D). Found (2, 3) and (1,).": lambda: (
        domain_adversarial_loss(torch.sum, TWO, ONE)
    ),
    "`value` should be a scalar that depends on `parameters`. Found a tensor without a graph.": lambda: hessian_product(
        ONE[0], [ONE], [ONE]
    ),
    "`divergence` should be a scalar that depends on `parameters`. Found shape (1,).": lambda: natural_gradient(
        ONE[0].clone().requires_grad_(), ONE, [ONE]
    ),
    "`adversarial_loss` should depend on `last_layer`. Found a tensor without a graph.": lambda: adaptive_weight(
        (w := ONE.clone().requires_grad_()).sum(), ONE[0], w
    ),
    "`t` should be a floating-point tensor. Found torch.int64.": lambda: consistency_loss(
        torch.add, TWO, TWO, torch.ones(2).long(), torch.ones(2)
    ),
    "`old_tensors['w']` should be float32 or float64, as half precision rounds small steps to 0. Found "
    "torch.float16.": lambda: incremental_update({"w": ONE.half()}, {"w": ONE.half()}, 0.1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_input_is_refused(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        REFUSED[message]()


def test_a_newton_step_of_half_precision_is_solved_in_float32():
    root = torch.tensor([2.0, 3.0]).half()
    assert newton_step(lambda w: w.square() - torch.tensor([4.0, 9.0]).half(), root).tolist() == [2, 3]


def test_a_queue_of_keys_is_made_on_the_default_device():
    with torch.device("meta"):
        assert KeyQueue(4, 2).keys.device.type == "meta"
