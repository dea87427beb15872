"""Where random numbers come from: one meaning of `generator` in every public function.

A generator that is given is drawn from, and nothing global is. None is torch's global generator: `torch.manual_seed`
decides, and what is drawn moves it on. Whether anything is drawn is another argument's business.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import calls
import pytest
import torch
from each import each
from torch import Tensor, nn
from values import seeded

from toolkit._random import own_generator, seeded_generator, starts_at_random

# A run that can be resumed knows its seed, so it has a generator of its own, which it hands to its method.
TRAINED = {name for name in calls.FUNCTIONS if name.endswith(".example") or name == "adversarial.train"}

# All but the methods that bind a generator to an attack.
NAMES = [
    name
    for name, function in calls.FUNCTIONS.items()
    if "generator" in calls.parameters_of(function) and not name.endswith(".attack")
]

EVALUATED = {"attacks": {"R+FGSM": lambda *args, **options: calls.adv.rs_fgsm(*args, **options)}}

# Those that draw only if they are asked.
ASKED: dict[str, dict[str, Any]] = {
    "adversarial.apgd": {"random_start": True},
    "adversarial.fab": {"restarts": 2},
    "adversarial.mi_fgsm": {"random_start": True},
    "adversarial.multi_target": {"restarts": 2},
    "adversarial.pgd": {"random_start": True},
    "adversarial.ensemble": EVALUATED,
    "adversarial.evaluate_robustness": {
        "attacks": {"RS": lambda *args, **options: calls.adv.rs_fgsm(*args, **options)}
    },
    "adversarial.robust_accuracy": EVALUATED,
    "adversarial.robustness_curve": EVALUATED,
    "em.gradient_em": {"batch_size": 3},
}


def _tensors(found: Any) -> Iterator[Tensor]:
    """Return all tensors and numbers of an answer."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, float | int):
        yield torch.tensor(found)
    elif isinstance(found, nn.Module):
        yield from found.state_dict().values()
    elif dataclasses.is_dataclass(found):
        yield from _tensors(
            [getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "seconds"]
        )
    elif isinstance(found, Mapping):
        yield from _tensors(list(found.values()))
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for part in found:
            yield from _tensors(part)


def _answer(name: str, **changed: Any) -> list[Tensor]:
    found = calls.CALLS[name](**{**ASKED.get(name, {}), **changed})
    return [tensor.clone() for tensor in _tensors(found)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    assert len(one) == len(other)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def test_every_public_function_with_a_generator_has_a_call() -> None:
    assert set(NAMES) - set(calls.CALLS) == set()


@each("name", NAMES)
def test_a_generator_is_drawn_from_and_nothing_global_is(name: str) -> None:
    before = torch.get_rng_state()
    generator = seeded(1)
    first = _answer(name, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(generator.get_state(), seeded(1).get_state())
    assert _same(first, _answer(name, generator=seeded(1)))


@each("name", NAMES)
def test_all_but_generators_is_refused(name: str) -> None:
    for wrong in ("0", 0.5, [0]):
        with pytest.raises(TypeError, match=r"generator.* be (a torch\.Generator|torch\.Generator|of type Generator)"):
            _answer(name, generator=wrong)


@each("name", [name for name in NAMES if name not in TRAINED])
def test_none_is_torchs_global_generator(name: str) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = _answer(name, generator=None)
        assert not torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        assert _same(first, _answer(name, generator=None))


@pytest.mark.parametrize("name", sorted(TRAINED & set(NAMES)))
def test_a_run_that_can_be_resumed_has_a_generator_of_its_own(name: str) -> None:
    assert calls.parameters_of(calls.FUNCTIONS[name])["generator"].annotation == "torch.Generator"


@pytest.mark.parametrize("name", [name for name in ASKED if name.startswith("adversarial.")])
def test_an_attack_that_is_not_asked_to_draw_draws_nothing(name: str) -> None:
    before = torch.get_rng_state()
    calls.CALLS[name](**({} if "attacks" in ASKED[name] else {"generator": None}))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [name for name in ASKED if "attacks" in ASKED[name]])
def test_an_evaluation_has_the_same_figures_every_time_unless_told_otherwise(name: str) -> None:
    before = torch.get_rng_state()
    assert _same(_answer(name, generator=0), _answer(name, generator=seeded(0)))
    assert calls.parameters_of(calls.FUNCTIONS[name])["generator"].default == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_own_generators() -> None:
    given = seeded(3)
    assert own_generator(given) is given
    assert seeded_generator(given) is given
    assert seeded_generator(3).initial_seed() == 3
    with torch.random.fork_rng([]):
        assert own_generator(None).initial_seed() != own_generator(None).initial_seed()
    with pytest.raises(TypeError, match=r"`generator` should be a torch\.Generator, or None\. Found int\."):
        own_generator(3)
    with pytest.raises(TypeError, match=r"`generator` should be a torch\.Generator, or None\. Found str\."):
        seeded_generator("3")


@pytest.mark.parametrize(("generator", "restarts", "expected"), [(None, 1, False), (None, 2, True), (0, 1, True)])
def test_random_starts_that_nobody_decides(generator: int | None, restarts: int, expected: bool) -> None:
    given = None if generator is None else seeded(generator)
    assert starts_at_random(None, given, restarts) is expected


def test_random_starts_that_are_decided() -> None:
    assert not starts_at_random(False, seeded(0))
    assert starts_at_random(True, None)
    with pytest.raises(ValueError, match=r"`random_start` should be True for several restarts, .* Found False\."):
        starts_at_random(False, seeded(0), 2)
