"""A call of every public function of a room that takes a number or a generator, for tests that ask all the same.

`FUNCTIONS` has the public functions; `CALLS` has, for each of them, a small call that succeeds. A room may have its own
in ``tests/<room>/calls_<room>.py``, under the same names. An algorithm that is one file has its `BlockCase` and no
entry here.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from folders import TESTS
from torch import nn

import toolkit
from toolkit import adversarial as adv
from toolkit import datasets as data
from toolkit import em, gradients, rbm, runner, softmax
from toolkit.em import hmm
from toolkit.rbm import bias

# What the library makes and hands out: nobody calls these with numbers of their own.
RESULTS = {
    *("adversarial.CatastrophicOverfittingWarning", "adversarial.DivergenceError", "adversarial.History"),
    *("em.Candidate", "em.Climb", "em.IncrementalState", "em.OnlineState", "em.Selection", "em.Statistics.scaled"),
    *("gradients.BlockEffect", "gradients.MemoryUse", "gradients.ModeFinding", "gradients.Verdict"),
    *("rbm.DivergenceError", "rbm.LogPartition", "rbm.TemperedState", "rbm.TemperingDiagnosis", "rbm.bias.Bias"),
    "rbm.TrajectoryRatios",
}

# What others derive from: the methods of the classes derived are called. `Free.step` is called by `train`.
ABSTRACT = {
    *("adversarial.Free.step", "adversarial.Method.example", "adversarial.Method.loss", "adversarial.Method.step"),
    *("em.hmm.Emissions.m_step", "em.hmm.Emissions.sample", "rbm.Layer.sample", "rbm.Layer.relaxed_sample"),
}


def public_functions() -> dict[str, Callable[..., Any]]:
    """Return all public functions, classes and methods of the rooms, by their names below `toolkit`."""
    found = dict(_public(data))
    for room in pkgutil.iter_modules(toolkit.__path__, "toolkit."):
        if room.ispkg and not room.name.split(".")[1].startswith("_"):
            found.update(_public(importlib.import_module(room.name)))
    return found


def _public(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        path = f"{module.__name__}.{name}".removeprefix("toolkit.")
        if isinstance(value, ModuleType):
            yield from _public(value)
        elif inspect.isclass(value):
            yield path, value
            members = ((member, getattr(value, member)) for member in vars(value) if not member.startswith("_"))
            yield from ((f"{path}.{member}", method) for member, method in members if callable(method))
        elif inspect.isroutine(value):
            yield path, value


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function and its ``**options``, none where Python does not know them."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:
        return {}
    return {**parameters, **_options_of(parameters.get("options"), getattr(function, "__globals__", {}))}


def _options_of(options: inspect.Parameter | None, names: dict[str, Any]) -> dict[str, inspect.Parameter]:
    """Return the keywords of ``**options: Unpack[Options]``."""
    keywords = re.fullmatch(r"Unpack\[(\w+)\]", str(options.annotation)) if options else None
    annotations = names[keywords[1]].__annotations__ if keywords else {}
    return {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind.__forward_arg__)
        for name, kind in annotations.items()
    }


def numbers_of(function: Callable[..., Any]) -> dict[str, set[str]]:
    """Return the parameters that are numbers, with the alternatives of their annotations, ``{"int", "None"}`` say.

    What may as well be an array or a sequence of numbers is none.
    """
    kinds = {
        name: set(re.split(r"\s*\|\s*", str(parameter.annotation).strip("'\"")))
        for name, parameter in parameters_of(function).items()
    }
    return {
        name: kind
        for name, kind in kinds.items()
        if kind & {"int", "float"} and not kind & {"Array", "Sequence[float]"}
    }


def _generator() -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(0)


# --- what the calls are given ------------------------------------------------------------------------------------

MODEL = adv.mlp(2, 3, widths=[3], generator=_generator()).eval()
INPUTS = torch.tensor([[0.2, 0.6], [0.7, 0.3]])
LABELS = MODEL(INPUTS).argmax(1)  # not broken before an attack begins
BALL: Any = {"epsilon": 0.2, "norm": "linf", "bounds": (0, 1)}
IMAGES = torch.rand(2, 1, 3, 3, generator=_generator())

SAMPLES = torch.tensor([[0.0, 1.0], [1.0, 0.2], [0.4, 0.1], [8.0, 9.5], [9.0, 8.0], [10.0, 10.0]], dtype=torch.float64)
HALVES = torch.tensor([0.5, 0.5], dtype=torch.float64)
MIXTURE = em.GaussianParameters.from_covariances(
    weights=HALVES,
    means=SAMPLES[1:5:3],
    covariances=torch.eye(2, dtype=torch.float64).expand(2, 2, 2),
    covariance_type="full",
)
PARSIMONIOUS = em.fit_parsimonious(SAMPLES, 2, "EII", generator=_generator()).parameters
COUNTS = torch.tensor([[0.0, 1.0], [1.0, 0.0], [7.0, 3.0], [8.0, 4.0]], dtype=torch.float64)
BITS = (COUNTS > 2).double()
STEPS = torch.tensor([0, 0, 1, 0, 1, 1])
SYMBOLS = hmm.CategoricalEmissions(log_probabilities=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log())
NORMAL = hmm.GaussianEmissions(
    means=MIXTURE.means, precisions_cholesky=MIXTURE.precisions_cholesky, covariance_type="full"
)
MARKOV = hmm.HMMParameters.of(
    start=torch.tensor([0.5, 0.5]), transition=torch.tensor([[0.7, 0.3], [0.3, 0.7]]), emissions=SYMBOLS
)

MACHINE = rbm.RBM(3, 2, generator=_generator())
ROWS = torch.eye(3)[:2]
TEMPERED = rbm.tempered_start(MACHINE, n_temperatures=3, n_chains=4, generator=_generator())
BETAS = [0.0, 0.4, 1.0]


def _attacked(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda model, inputs, labels, **_: x


def _flat(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def _squares(weight: torch.Tensor) -> gradients.Field:
    return gradients.field_jacobian(lambda: weight.square().prod(), weight)


def _spread(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"log_rate": -x.mean().log()}


def _exponential(parameters: dict[str, torch.Tensor]) -> torch.distributions.Distribution:
    return torch.distributions.Exponential(parameters["log_rate"].exp())


def _fitted(kind: type[Any], x: torch.Tensor) -> Callable[..., Any]:
    return lambda **parameters: kind(random_state=0, **parameters).fit(x.cpu().numpy())


def _trainer(**changed: Any) -> rbm.FusedTrainer:
    machine = rbm.RBM(3, 2, generator=_generator())
    options = {"batch_size": 2, "steps": 1, "chains": torch.zeros(4, 2), "generator": _generator()} | changed
    return rbm.FusedTrainer(machine, **options)


def _trained(**changed: Any) -> nn.Module:
    trainer = _trainer(**changed)
    trainer.step(ROWS, learning_rate=0.1)
    return trainer.rbm


def _entered_audit(memory: float) -> None:
    with gradients.audited(memory=memory):
        pass


class Call:
    """A function and what it is called with; what was drawn from a generator before is drawn anew for each call."""

    def __init__(self, function: Callable[..., Any], **arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self, **changed: Any) -> Any:
        """Return the answer, with some arguments changed."""
        generators = {"generator": _generator()} if "generator" in parameters_of(self.function) else {}
        return self.function(**{**generators, **self.arguments, **changed})


ATTACKED = {"model": MODEL, "x": INPUTS, "labels": LABELS, "epsilon": 0.2}
LOSS = {"model": MODEL, "x": INPUTS, "labels": LABELS, "attack": _attacked(INPUTS + 0.1)}
LINEAR = {"weight": MODEL[0].weight, "bias": None, "x": INPUTS, "labels": LABELS, "epsilon": 0.2}
EXAMPLE = {"model": MODEL, "x": INPUTS, "labels": LABELS, "ball": BALL}
CHAIN = {"rbm": MACHINE, "steps": 2}
CD = CHAIN | {"data": ROWS, "chain": "concrete", "temperature": 0.5}
PCD = CD | {"chains": torch.zeros(4, 3)}
TEMPER = CHAIN | {"state": TEMPERED, "inverse_temperatures": BETAS}
LANGEVIN = {"rbm": rbm.RBM(3, 2, visible="gaussian", generator=_generator()), "steps": 2, "step_size": 0.5}
START = {"x": SAMPLES, "n_components": 2}
HMM = {"n_components": 2, "tol": 0.1}


def _events(below: Any, above: Any) -> list[runner.Event]:
    """An event has one of the two limits."""
    return [runner.Event(says="it happens", metric="loss", **limit) for limit in ({"below": below}, {"above": above})]


CALLS: dict[str, Call] = {
    "adversarial.ALP": Call(adv.ALP, step_size=0.5),
    "adversarial.AWP": Call(adv.AWP),
    "adversarial.AWP.example": Call(adv.AWP().example, **EXAMPLE),
    "adversarial.Ball": Call(adv.Ball, epsilon=0.1),
    "adversarial.CURE": Call(adv.CURE),
    "adversarial.EOT": Call(adv.EOT, model=MODEL),
    "adversarial.FGSM.attack": Call(adv.FGSM().attack, ball=BALL),
    "adversarial.Free": Call(adv.Free),
    "adversarial.HeldTRADES": Call(adv.HeldTRADES, step_size=0.5),
    "adversarial.LLR": Call(adv.LLR, step_size=0.5),
    "adversarial.LLR.example": Call(adv.LLR().example, **EXAMPLE),
    "adversarial.MART": Call(adv.MART, step_size=0.5),
    "adversarial.Normalize": Call(adv.Normalize, mean=0.5, std=0.5),
    "adversarial.PGD": Call(adv.PGD, step_size=0.5),
    "adversarial.PGD.attack": Call(adv.PGD().attack, ball=BALL),
    "adversarial.RSFGSM": Call(adv.RSFGSM),
    "adversarial.RSFGSM.attack": Call(adv.RSFGSM().attack, ball=BALL),
    "adversarial.TRADES": Call(adv.TRADES, step_size=0.5),
    "adversarial.TRADES.example": Call(adv.TRADES().example, **EXAMPLE),
    "adversarial.VAT": Call(adv.VAT, iterations=2, xi=0.1),
    "adversarial.VAT.example": Call(adv.VAT(iterations=1).example, **EXAMPLE),
    "adversarial.alp_loss": Call(adv.alp_loss, **LOSS, weight=0.5),
    "adversarial.apgd": Call(adv.apgd, **ATTACKED, steps=3),
    "adversarial.awp_loss": Call(adv.awp_loss, model=MODEL, loss=lambda model: model(INPUTS).sum(), gamma=0.1),
    "adversarial.carlini_wagner": Call(adv.carlini_wagner, **ATTACKED, n_classes=3, steps=3, searches=2),
    "adversarial.certify_crown": Call(adv.certify_crown, **ATTACKED),
    "adversarial.certify_interval": Call(adv.certify_interval, **ATTACKED),
    "adversarial.certify_linear": Call(adv.certify_linear, **LINEAR),
    "adversarial.certify_smoothing": Call(adv.certify_smoothing, model=MODEL, x=INPUTS, sigma=0.5, samples=20),
    "adversarial.cure_loss": Call(adv.cure_loss, model=MODEL, x=INPUTS, labels=LABELS, h=0.5, weight=0.5),
    "adversarial.ddn": Call(adv.ddn, **ATTACKED, n_classes=3, steps=3),
    "adversarial.deepfool": Call(adv.deepfool, **ATTACKED, n_classes=3, steps=3),
    "adversarial.di_fgsm": Call(
        adv.di_fgsm, model=_flat, x=IMAGES, labels=_flat(IMAGES).argmax(1), epsilon=0.2, steps=2, step_size=0.1
    ),
    "adversarial.ensemble": Call(adv.ensemble, **ATTACKED, attacks={"PGD": adv.pgd}),
    "adversarial.evaluate_robustness": Call(adv.evaluate_robustness, **ATTACKED, attacks={"PGD": adv.pgd}),
    "adversarial.fab": Call(adv.fab, **ATTACKED, n_classes=3, steps=3),
    "adversarial.fgsm": Call(adv.fgsm, **ATTACKED),
    "adversarial.free_loss": Call(adv.free_loss, **ATTACKED, perturbation=torch.zeros(2, 2)),
    "adversarial.held_trades_loss": Call(adv.held_trades_loss, **LOSS),
    "adversarial.interval_loss": Call(adv.interval_loss, **ATTACKED),
    "adversarial.jsma": Call(adv.jsma, model=MODEL, x=INPUTS, labels=LABELS, share=1.0),
    "adversarial.linearised": Call(adv.linearised, **ATTACKED, at_once=2),
    "adversarial.llr_loss": Call(adv.llr_loss, **LOSS),
    "adversarial.mart_loss": Call(adv.mart_loss, **LOSS),
    "adversarial.mi_fgsm": Call(adv.mi_fgsm, **ATTACKED, steps=3, step_size=0.1),
    "adversarial.mlp": Call(adv.mlp, n_features=2, n_classes=3, widths=[4]),
    "adversarial.multi_target": Call(adv.multi_target, **ATTACKED, steps=3, at_once=2),
    "adversarial.ni_fgsm": Call(adv.ni_fgsm, **ATTACKED, steps=3, step_size=0.1),
    "adversarial.one_pixel": Call(adv.one_pixel, model=MODEL, x=INPUTS, labels=LABELS, steps=2, population=4),
    "adversarial.pgd": Call(adv.pgd, **ATTACKED, steps=3, step_size=0.1),
    "adversarial.power_direction": Call(adv.power_direction, model=MODEL, x=INPUTS, xi=0.1),
    "adversarial.preactivation_resnet18": Call(adv.preactivation_resnet18, width=2),
    "adversarial.random_crop_flip": Call(adv.random_crop_flip, x=IMAGES, padding=1),
    "adversarial.robust_accuracy": Call(adv.robust_accuracy, **ATTACKED, attacks={"PGD": adv.pgd}),
    "adversarial.robust_loss_linear": Call(
        adv.robust_loss_linear, **LINEAR | {"weight": MODEL[0].weight[:2], "labels": torch.tensor([0, 1])}
    ),
    "adversarial.robustness_curve": Call(
        adv.robustness_curve, model=MODEL, x=INPUTS, labels=LABELS, epsilons=[0.1], attacks={"PGD": adv.pgd}
    ),
    "adversarial.rs_fgsm": Call(adv.rs_fgsm, **ATTACKED, step_size=0.1),
    "adversarial.small_cnn": Call(adv.small_cnn, n_classes=2, image_size=4, widths=[2], strides=[1]),
    "adversarial.sparsefool": Call(adv.sparsefool, model=MODEL, x=INPUTS, labels=LABELS),
    "adversarial.spsa": Call(adv.spsa, **ATTACKED, steps=2, directions=4),
    "adversarial.square": Call(
        adv.square, model=_flat, x=IMAGES, labels=_flat(IMAGES).argmax(1), epsilon=0.2, queries=5
    ),
    "adversarial.standard_attacks": Call(adv.standard_attacks, n_classes=3),
    "adversarial.ti_fgsm": Call(
        adv.ti_fgsm,
        model=_flat,
        x=IMAGES,
        labels=_flat(IMAGES).argmax(1),
        epsilon=0.2,
        steps=2,
        step_size=0.1,
        sigma=1.0,
    ),
    "adversarial.trades_loss": Call(adv.trades_loss, **LOSS),
    "adversarial.train": Call(
        lambda **options: adv.train(adv.mlp(2, 3, widths=[4], generator=_generator()), INPUTS, LABELS, **options),
        generator=_generator(),
        method="fgsm",
        epsilon=0.2,
        epochs=1,
        learning_rate=0.1,
        average=0.5,
        evaluate=lambda model: {"robust": 1.0},
        patience=2,
        batch_size=2,
        epsilon_warmup=0.5,
        evaluate_every=1,
        checkpoint_every=5,
        verbose=0,
    ),
    "adversarial.vat_loss": Call(adv.vat_loss, model=MODEL, x=INPUTS, epsilon=0.2),
    "adversarial.verify_relu": Call(adv.verify_relu, **ATTACKED, time_limit=100.0),
    "adversarial.vmi_fgsm": Call(adv.vmi_fgsm, **ATTACKED, steps=2, step_size=0.1),
    "adversarial.weight_perturbation": Call(
        adv.weight_perturbation, model=MODEL, loss=lambda model: model(INPUTS).sum(), gamma=0.1
    ),
    "datasets.bars_and_stripes": Call(data.bars_and_stripes, side=2),
    "datasets.two_gaussians": Call(data.two_gaussians, n_samples=4, separation=2.0),
    "em.BaseMixture.sample": Call(em.GaussianMixture(2, random_state=0).fit(SAMPLES.cpu().numpy()).sample),
    "em.BernoulliMixture": Call(em.BernoulliMixture, log_weights=HALVES.log(), logits=torch.zeros(2, 2)),
    "em.BernoulliMixture.from_probabilities": Call(
        em.BernoulliMixture.from_probabilities, weights=HALVES, probabilities=torch.full((2, 2), 0.5)
    ),
    "em.BernoulliMixture.start": Call(em.BernoulliMixture.start, x=BITS, n_components=2),
    "em.BernoulliMixture.sample": Call(
        em.BernoulliMixture(log_weights=HALVES.log(), logits=torch.zeros(2, 2)).sample, n=3
    ),
    "em.CategoricalHMM": Call(_fitted(em.CategoricalHMM, STEPS[:, None]), **HMM, n_features=2),
    "em.CategoricalMixture": Call(
        em.CategoricalMixture,
        log_weights=HALVES.log(),
        log_probabilities=torch.full((2, 2), 0.5).log(),
        n_categories=(2,),
    ),
    "em.CategoricalMixture.from_probabilities": Call(
        em.CategoricalMixture.from_probabilities, weights=HALVES, probabilities=[torch.full((2, 2), 0.5)]
    ),
    "em.CategoricalMixture.start": Call(em.CategoricalMixture.start, x=BITS.long(), n_components=2),
    "em.CategoricalMixture.sample": Call(
        em.CategoricalMixture.start(BITS.long(), 2, generator=_generator()).sample, n=3
    ),
    "em.DistributionMixture": Call(
        em.DistributionMixture, log_weights=HALVES.log(), parameters={"log_rate": HALVES}, build=_exponential
    ),
    "em.DistributionMixture.start": Call(
        em.DistributionMixture.start, x=COUNTS[:, :1] + 1, n_components=2, build=_exponential, guess=_spread
    ),
    "em.DistributionMixture.sample": Call(
        em.DistributionMixture(log_weights=HALVES.log(), parameters={"log_rate": HALVES}, build=_exponential).sample,
        n=3,
    ),
    "em.FactorAnalysers": Call(
        em.FactorAnalysers,
        log_weights=HALVES.log(),
        means=MIXTURE.means,
        loadings=torch.ones(2, 2, 1),
        noise=torch.ones(2, 2),
        noise_type="diag",
    ),
    "em.FactorAnalysers.start": Call(em.FactorAnalysers.start, **START, n_factors=1, noise_floor=0.1),
    "em.FactorAnalysers.sample": Call(
        em.FactorAnalysers.start(SAMPLES, 2, n_factors=1, generator=_generator()).sample, n=3
    ),
    "em.GaussianHMM": Call(_fitted(em.GaussianHMM, SAMPLES), **HMM),
    "em.GaussianMixture": Call(_fitted(em.GaussianMixture, SAMPLES), n_components=2, n_init_keep=2),
    "em.PoissonMixture": Call(
        em.PoissonMixture, log_weights=HALVES.log(), log_rates=torch.zeros(2, 2), prior_rates=torch.ones(2)
    ),
    "em.PoissonMixture.from_rates": Call(
        em.PoissonMixture.from_rates, weights=HALVES, rates=torch.ones(2, 2), prior_rates=torch.ones(2)
    ),
    "em.PoissonMixture.start": Call(em.PoissonMixture.start, x=COUNTS, n_components=2),
    "em.PoissonMixture.sample": Call(
        em.PoissonMixture(log_weights=HALVES.log(), log_rates=torch.zeros(2, 2)).sample, n=3
    ),
    "em.Prior": Call(
        em.Prior,
        concentration=torch.ones(2),
        mean=torch.zeros(2),
        shrinkage=0.1,
        degrees_of_freedom=4.0,
        scale=torch.eye(2),
    ),
    "em.Prior.default": Call(em.Prior.default, **START, covariance_type="full"),
    "em.Statistics.maximise": Call(em.Statistics.implied_by(MIXTURE).maximise),
    "em.StudentMixture": Call(
        em.StudentMixture,
        log_weights=HALVES.log(),
        means=MIXTURE.means,
        precisions_cholesky=MIXTURE.precisions_cholesky,
        degrees_of_freedom=torch.tensor([4.0, 4.0]),
        covariance_type="full",
    ),
    "em.StudentMixture.from_scatters": Call(
        em.StudentMixture.from_scatters,
        weights=HALVES,
        means=MIXTURE.means,
        scatters=torch.eye(2).double().expand(2, 2, 2),
        degrees_of_freedom=torch.tensor([4.0, 4.0]),
        covariance_type="full",
    ),
    "em.StudentMixture.start": Call(em.StudentMixture.start, **START, degrees_of_freedom=4.0),
    "em.StudentMixture.sample": Call(em.StudentMixture.start(SAMPLES, 2, generator=_generator()).sample, n=3),
    "em.aic": Call(em.aic, log_likelihood=-3.0, n_parameters=2, n_samples=5.0),
    "em.bic": Call(em.bic, log_likelihood=-3.0, n_parameters=2, n_samples=5.0),
    "em.climb": Call(
        em.climb,
        em=lambda x: (x / 2, float(-x.square())),
        start=torch.ones(()).double(),
        pack=lambda x: x[None],
        unpack=lambda x: x[0],
        max_iter=3,
    ),
    "em.covariances_from_scatter": Call(
        em.covariances_from_scatter,
        model="EVE",
        counts=torch.tensor([3.0, 4.0]).double(),
        scatter=torch.stack([torch.eye(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]])]).double(),
    ),
    "em.draw_missing": Call(em.draw_missing, parameters=MIXTURE, x=SAMPLES, n_draws=2),
    "em.em_step": Call(em.em_step, parameters=MIXTURE, x=SAMPLES),
    "em.em_step_missing": Call(em.em_step_missing, parameters=MIXTURE, x=SAMPLES),
    "em.evidence_lower_bound": Call(em.evidence_lower_bound, mixture=MIXTURE, x=SAMPLES),
    "em.fit": Call(em.fit, **START, n_init_keep=2),
    "em.fit_family": Call(em.fit_family, family=em.PoissonMixture, x=COUNTS, n_components=2),
    "em.fit_missing": Call(em.fit_missing, **START),
    "em.fit_parsimonious": Call(em.fit_parsimonious, **START, model="EII"),
    "em.gradient_em": Call(
        em.gradient_em,
        start=MIXTURE,
        x=SAMPLES,
        optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.1),
        steps=2,
        batch_size=3,
    ),
    "em.hmm.CategoricalEmissions.m_step": Call(SYMBOLS.m_step, x=STEPS, posteriors=torch.full((6, 2), 0.5)),
    "em.hmm.CategoricalEmissions.sample": Call(SYMBOLS.sample, states=STEPS),
    "em.hmm.DirichletPrior": Call(hmm.DirichletPrior),
    "em.hmm.GaussianEmissions.m_step": Call(NORMAL.m_step, x=SAMPLES, posteriors=torch.full((6, 2), 0.5).double()),
    "em.hmm.GaussianEmissions.sample": Call(NORMAL.sample, states=STEPS),
    "em.hmm.em_step": Call(hmm.em_step, parameters=MARKOV, x=STEPS),
    "em.hmm.fit": Call(hmm.fit, start=MARKOV, x=STEPS, max_iter=3),
    "em.hmm.m_step": Call(hmm.m_step, parameters=MARKOV, x=STEPS, posteriors=hmm.posteriors(MARKOV, STEPS)),
    "em.hmm.sample": Call(hmm.sample, parameters=MARKOV, lengths=[3, 2]),
    "em.icl": Call(em.icl, mixture=MIXTURE, x=SAMPLES, n_parameters=11),
    "em.incremental_start": Call(em.incremental_start, parameters=MIXTURE),
    "em.m_step": Call(em.m_step, x=SAMPLES, responsibilities=torch.full((6, 2), 0.5).double(), covariance_type="full"),
    "em.maximise_likelihood": Call(em.maximise_likelihood, start=MIXTURE, x=SAMPLES, max_iter=3, batch_size=4),
    "em.n_free_parameters": Call(em.n_free_parameters, model="VVV", n_components=2, n_features=3),
    "em.online_start": Call(em.online_start, parameters=MIXTURE, average_from=3),
    "em.select": Call(em.select, x=SAMPLES, n_components=[1, 2], models=["EII"], n_init=1),
    "em.spikes": Call(em.spikes, parameters=PARSIMONIOUS),
    "em.start": Call(em.start, **START, covariance_type="full"),
    "em.start_missing": Call(em.start_missing, **START, covariance_type="full"),
    "gradients.audited": Call(_entered_audit, memory=100.0),
    "gradients.Field.estimate_asymmetry": Call(
        _squares(torch.tensor([1.0, 2.0], requires_grad=True)).estimate_asymmetry
    ),
    "gradients.Field.leading_eigenvalues": Call(
        _squares(torch.tensor([1.0, 2.0], requires_grad=True)).leading_eigenvalues, k=2
    ),
    "rbm.Bernoulli.sample": Call(MACHINE.joint.hidden.sample, x=torch.zeros(2, 2)),
    "rbm.Bernoulli.relaxed_sample": Call(MACHINE.joint.hidden.relaxed_sample, x=torch.zeros(2, 2), temperature=0.5),
    "rbm.BernoulliRBM": Call(
        _fitted(rbm.BernoulliRBM, ROWS),
        verbose=0,
        batch_size=2,
        offset_rate=0.1,
        n_components=2,
        n_iter=2,
        learning_rate=0.1,
        n_chains=3,
        fast_rate=0.1,
        average_from=0.5,
        binarize=0.5,
        method="fpcd",
    ),
    "rbm.Categorical": Call(rbm.Categorical, bias=torch.zeros(6), categories=3),
    "rbm.Categorical.sample": Call(rbm.Categorical(torch.zeros(6), 3).sample, x=torch.zeros(2, 6)),
    "rbm.Categorical.relaxed_sample": Call(
        rbm.Categorical(torch.zeros(6), 3).relaxed_sample, x=torch.zeros(2, 6), temperature=0.5
    ),
    "rbm.FusedTrainer": Call(_trained, batch_size=2, steps=1, fast_rate=0.1, offset_rate=0.5),
    "rbm.FusedTrainer.step": Call(_trainer().step, data=ROWS, learning_rate=0.1),
    "rbm.Gaussian.sample": Call(LANGEVIN["rbm"].joint.visible.sample, x=torch.zeros(2, 3)),
    "rbm.Gaussian.relaxed_sample": Call(
        LANGEVIN["rbm"].joint.visible.relaxed_sample, x=torch.zeros(2, 3), temperature=0.5
    ),
    "rbm.GaussianRBM": Call(
        _fitted(rbm.GaussianRBM, SAMPLES),
        verbose=0,
        n_components=2,
        n_iter=2,
        batch_size=2,
        n_chains=3,
        fast_rate=0.1,
        average_from=0.5,
        method="fpcd",
    ),
    "rbm.Joint.sample_hidden": Call(MACHINE.joint.sample_hidden, visible=ROWS),
    "rbm.Joint.sample_visible": Call(MACHINE.joint.sample_visible, hidden=torch.zeros(2, 2)),
    "rbm.Joint.annealed": Call(MACHINE.joint.annealed, inverse_temperature=0.5),
    "rbm.RBM": Call(rbm.RBM, n_visible=3, n_hidden=2, visible="categorical", categories=3),
    "rbm.RBM.sample_hidden": Call(MACHINE.sample_hidden, visible=ROWS),
    "rbm.RBM.sample_visible": Call(MACHINE.sample_visible, hidden=torch.zeros(2, 2)),
    "rbm.RBM.sample_exactly": Call(MACHINE.sample_exactly, n=3),
    "rbm.Rectified.sample": Call(rbm.Rectified(torch.zeros(2)).sample, x=torch.ones(2, 2)),
    "rbm.Rectified.noisy_sample": Call(rbm.Rectified(torch.zeros(2)).noisy_sample, x=torch.ones(2, 2)),
    "rbm.adapt_temperatures": Call(rbm.adapt_temperatures, **TEMPER, rounds=1),
    "rbm.ais": Call(rbm.ais, rbm=MACHINE, chains=3, inverse_temperatures=4),
    "rbm.bias.chain_distribution": Call(bias.chain_distribution, **CHAIN, start=torch.full((8,), 1 / 8)),
    "rbm.bias.exact_divergence": Call(
        bias.exact_divergence, **CHAIN, start=torch.full((8,), 1 / 8), divergence="kullback_leibler"
    ),
    "rbm.bias.gradient_fields": Call(bias.gradient_fields, **CHAIN, start=torch.full((8,), 1 / 8)),
    "rbm.centered_contrastive_divergence": Call(rbm.centered_contrastive_divergence, **CD),
    "rbm.centering_offsets": Call(rbm.centering_offsets, rbm=MACHINE, data=ROWS),
    "rbm.contrastive_divergence": Call(rbm.contrastive_divergence, **CD),
    "rbm.cosine_decay": Call(rbm.cosine_decay, initial=0.1),
    "rbm.exact_samples": Call(rbm.exact_samples, joint=MACHINE.joint, n=3),
    "rbm.fast_persistent_contrastive_divergence": Call(rbm.fast_persistent_contrastive_divergence, **PCD, fast={}),
    "rbm.gibbs": Call(rbm.gibbs, **CHAIN, visible=ROWS, chain="concrete", temperature=0.5),
    "rbm.gibbs_langevin": Call(rbm.gibbs_langevin, **LANGEVIN, visible=ROWS),
    "rbm.langevin_contrastive_divergence": Call(
        rbm.langevin_contrastive_divergence, **LANGEVIN, data=ROWS, chains=torch.zeros(4, 3)
    ),
    "rbm.linear_decay": Call(rbm.linear_decay, initial=0.1),
    "rbm.parallel_tempering": Call(rbm.parallel_tempering, **TEMPER),
    "rbm.persistent_contrastive_divergence": Call(rbm.persistent_contrastive_divergence, **PCD),
    "rbm.rank_generator": Call(rbm.rank_generator, seed=3, group=None),
    "rbm.reverse_ais": Call(rbm.reverse_ais, rbm=MACHINE, visible=ROWS, inverse_temperatures=4),
    "rbm.sandwich": Call(rbm.sandwich, rbm=MACHINE, visible=ROWS, chains=3, inverse_temperatures=4),
    "rbm.spread_temperatures": Call(
        rbm.spread_temperatures, inverse_temperatures=BETAS, swap_rates=torch.tensor([0.5, 0.7]), n_temperatures=4
    ),
    "rbm.tempered_contrastive_divergence": Call(rbm.tempered_contrastive_divergence, **TEMPER, data=ROWS),
    "rbm.tempered_start": Call(rbm.tempered_start, rbm=MACHINE, n_temperatures=2, n_chains=3),
    "rbm.train": Call(
        lambda **options: rbm.train(_trainer(), ROWS, **options),
        generator=_generator(),
        epochs=2,
        learning_rate=0.1,
        n_rows=2,
        average_from=0.5,
    ),
    "rbm.trajectory_tempering": Call(
        rbm.trajectory_tempering,
        machines=[MACHINE.joint.annealed(0.0), MACHINE.joint.annealed(0.5), MACHINE],
        state=TEMPERED,
        steps=2,
    ),
    "rbm.updated_fast_weights": Call(
        rbm.updated_fast_weights, fast={"w": torch.ones(2)}, gradients={"w": torch.ones(2)}, learning_rate=0.5
    ),
    "softmax.cross_entropy": Call(softmax.cross_entropy, logits=INPUTS, labels=torch.tensor([0, 1]), dim=1),
    "softmax.linear_cross_entropy": Call(
        softmax.linear_cross_entropy,
        input=INPUTS,
        weight=torch.eye(3)[:, :2],
        labels=LABELS,
        chunk_size=2,
        ignore_index=1,
    ),
    "runner.Event": Call(_events, below=0.0, above=1.0),
    "runner.Objective": Call(runner.Objective, label="loss", higher_is_better=False, best=0.0),
    "softmax.log_softmax": Call(softmax.log_softmax, input=INPUTS, dim=1),
    "softmax.logsumexp": Call(softmax.logsumexp, input=INPUTS, dim=1),
    "softmax.naive_softmax": Call(softmax.naive_softmax, input=INPUTS, dim=1),
    "softmax.softmax": Call(softmax.softmax, input=INPUTS, dim=1),
}

# Of the rooms that have theirs in a file of their own, which may import from this one.
for _file in sorted(TESTS.rglob("calls_*.py")):
    _room = importlib.import_module(_file.stem)
    CALLS |= _room.CALLS
    RESULTS |= getattr(_room, "RESULTS", set())

# All but those that nobody calls.
FUNCTIONS = {name: function for name, function in public_functions().items() if name not in RESULTS | ABSTRACT}


def given(name: str, argument: str) -> Any:
    """Return an argument of the call of a function, or its default."""
    return CALLS[name].arguments.get(argument, parameters_of(FUNCTIONS[name])[argument].default)
