"""What every block must be tried with: a program, its parameters, and a witness of both of its gradients.

Each algorithm's test file lists its programs in ``BLOCK_CASES``; `test_block_contract.py` asks all of them the same.
``PEER_CASES`` are those that are written once more for JAX and TensorFlow, in `peer_programs`.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from folders import TESTS
from torch import Tensor

from toolkit import Block


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """A program that one block is part of.

    Attributes:
        id: Readable name of the case.
        block: The block that is opened.
        parameters: Makes new float64 leaves.
        loss: The surrogate; makes its own generators anew, so that two calls give the same bits.
        blocked: Witness of the gradient with the block in place.
        opened: Witness of the gradient with the block open. None: central finite differences of `loss`, whose value
            does not depend on the block.
        tolerance: Largest allowed ``|gradient - witness| / |witness|``.
        without_peer: Why no program of another library finds the gradients too, where `peer_programs` has none.
    """

    id: str
    block: Block
    parameters: Callable[[], dict[str, Tensor]]
    loss: Callable[[Mapping[str, Tensor]], Tensor]
    blocked: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    opened: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    tolerance: float = 1e-10
    without_peer: str = ""


# Parameters and constants by name, and the loss of both.
PeerCase = tuple[
    Mapping[str, Tensor], Mapping[str, Tensor], Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
]


@functools.cache
def block_cases() -> list[BlockCase]:
    """Return the cases of every test file, imported under the name that pytest gives it."""
    return [case for cases in _in_test_files("BLOCK_CASES") for case in cases]


@functools.cache
def peer_cases() -> dict[str, PeerCase]:
    """Return name -> the torch side of a program in `peer_programs`, from the ``PEER_CASES`` of every test file."""
    return {name: case for cases in _in_test_files("PEER_CASES") for name, case in cases.items()}


def _in_test_files(variable: str) -> Iterator[Any]:
    for file in sorted(TESTS.rglob("test_*.py")):
        if re.search(rf"^{variable}\b", file.read_text("utf-8"), re.MULTILINE):
            name = ".".join(file.relative_to(TESTS.parent).with_suffix("").parts)
            yield getattr(importlib.import_module(name), variable)


def flatten(tree: Mapping[str, Tensor]) -> Tensor:
    """Return all values as one vector, in the order of the names."""
    return torch.cat([tree[name].detach().reshape(-1) for name in sorted(tree)])


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return ``|found - expected| / |expected|`` over all parameters, or the absolute error where expected is 0."""
    assert sorted(found) == sorted(expected)
    error, size = (flatten(found) - flatten(expected)).norm(), flatten(expected).norm()
    return float(error / size) if size > 0 else float(error)


def finite_differences(
    loss: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor], step: float = 1e-4
) -> dict[str, Tensor]:
    """Return the gradient of `loss` by central differences of fourth order."""
    gradient = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            slopes = torch.empty_like(parameter)
            values = parameter.view(-1)
            for i in range(values.numel()):
                centre = values[i].item()
                ends = []
                for offset in (-2, -1, 1, 2):
                    values[i] = centre + offset * step
                    ends.append(loss(parameters).item())
                values[i] = centre
                slopes.view(-1)[i] = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * step)
            gradient[name] = slopes
    return gradient
