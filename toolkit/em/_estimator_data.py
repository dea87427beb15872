"""Reads what users of an estimator hand in, and gives answers back in the same form: array or tensor, type, device.

N samples, D features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

Array: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.float32] | npt.NDArray[np.int64] | Tensor

RandomState: TypeAlias = int | np.random.RandomState | torch.Generator | None


@dataclass(frozen=True)
class Form:
    """In what form an answer is given.

    Attributes:
        numpy: Whether as an array, not as a tensor.
        dtype: Its floating-point type: float32 or float64.
        device: Its device.
    """

    numpy: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Array) -> Form:
        """Return the form of an array or a tensor of numbers."""
        if isinstance(x, Tensor):
            return cls(False, x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float64, x.device)
        return cls(True, torch.float32 if x.dtype == np.float32 else torch.float64, torch.device("cpu"))

    def give(self, values: Tensor) -> Array:
        """Return values in this form; integers and truth values keep their type."""
        if values.is_floating_point():
            values = values.to(self.dtype)
        values = values.to(self.device)
        # A copy of its own: what a user does to one attribute must not reach another.
        values = values.clone(memory_format=torch.contiguous_format)
        return values.numpy() if self.numpy else values


def read(estimator: BaseEstimator, x: object, *, reset: bool, missing: bool, least: int = 1) -> tuple[Tensor, Form]:
    """Return samples as a tensor of float32 or float64, without a copy where possible, and the form they came in.

    Args:
        estimator: Learns the number and the names of the features, or is asked for them.
        x: (N, D): a tensor, an array, or what scikit-learn reads as one.
        reset: Whether to learn the features.
        missing: Whether NaN is allowed.
        least: The fewest samples.

    Raises:
        TypeError: If `x` is sparse or complex.
        ValueError: If it has another shape, or other features, or is not finite.
    """
    from sklearn.utils.validation import validate_data

    if not isinstance(x, Tensor):
        finite = "allow-nan" if missing else True
        types = [np.float64, np.float32]
        array = validate_data(
            estimator, x, reset=reset, dtype=types, ensure_all_finite=finite, ensure_min_samples=least
        )
        return from_numpy(array), Form.of(array)
    if x.layout is not torch.strided or x.is_complex():
        raise TypeError(f"`X` should be a dense tensor of real numbers. Found {x.layout}, {x.dtype}.")
    if x.ndim != 2 or len(x) < least or x.shape[1] == 0:
        raise ValueError(f"`X` should have shape (N, D), at least ({least}, 1). Found {tuple(x.shape)}.")
    form = Form.of(x)
    x = x.to(form.dtype)
    allowed = ~x.isinf() if missing else x.isfinite()
    if not bool(allowed.all()):
        row = int((~allowed).any(1).nonzero()[0])
        hint = "" if missing or not bool(x.isnan().any()) else " `missing=True` fits what is observed."
        raise ValueError(f"`X` should be finite. Found {x[row].tolist()} in row {row}.{hint}")
    validate_data(estimator, x, reset=reset, skip_check_array=True)
    return x, form


def from_numpy(array: npt.NDArray[np.floating]) -> Tensor:
    """Return a tensor on the memory of an array, also of one that is read-only: nothing here writes to its input."""
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(np.asarray(array))


def read_chunks(
    estimator: BaseEstimator, source: object, *, reset: bool, missing: bool
) -> tuple[Callable[[], Iterator[Tensor]], Form]:
    """Return a function that reads all chunks again, each (B, D) and checked, and the form of the first one.

    Args:
        estimator: As in `read`.
        source: What `is_chunked` says yes to.
        reset: As in `read`, by the first chunk.
        missing: Whether NaN is allowed.

    Raises:
        TypeError: If the source can be read only once.
        ValueError: If there is no chunk, or as `read`, for each chunk.
    """
    if hasattr(source, "__next__"):
        raise TypeError(
            "`X` should be chunks that can be read again for each step: a list, a DataLoader, or a function that "
            f"returns a new iterator. Found {type(source).__name__}."
        )

    def chunks() -> Iterator[object]:
        again: Iterable[object] = source() if callable(source) else source  # type: ignore[assignment]
        for chunk in again:
            # A data loader's batch has the samples first, then perhaps labels.
            yield chunk[0] if isinstance(chunk, list | tuple) and chunk and hasattr(chunk[0], "shape") else chunk

    first = next(chunks(), None)
    if first is None:
        raise ValueError("`X` should have at least one chunk. Found none.")
    _, form = read(estimator, first, reset=reset, missing=missing)

    def again() -> Iterator[Tensor]:
        for chunk in chunks():
            if len(chunk):  # type: ignore[arg-type]
                yield read(estimator, chunk, reset=False, missing=missing)[0].to(form.device, form.dtype)

    return again, form


def is_chunked(x: object) -> bool:
    """Say whether samples come in chunks: a function, a list of matrices, or what can only be iterated."""
    if isinstance(x, Tensor):
        return False
    if isinstance(x, list | tuple):
        return bool(x) and all(getattr(chunk, "ndim", None) == 2 for chunk in x)
    if callable(x) and not hasattr(x, "__array__"):
        return True
    random_access = hasattr(x, "__getitem__") or hasattr(x, "__array__") or hasattr(x, "shape")
    return hasattr(x, "__iter__") and not random_access


def read_parts(estimator: BaseEstimator, x: object, *, missing: bool) -> tuple[Iterable[Tensor], Form]:
    """Return samples for a fitted estimator, in the parts they come in, and their form."""
    if is_chunked(x):
        again, form = read_chunks(estimator, x, reset=False, missing=missing)
        return again(), form
    samples, form = read(estimator, x, reset=False, missing=missing)
    return [samples], form


def read_weights(sample_weight: object, n_samples: int, like: Tensor) -> Tensor | None:
    """Return the weights of the samples, (N,) float64 on the device of the samples, or None for equal ones.

    Raises:
        ValueError: If there are not N, one is negative or not finite, or all are 0.
    """
    if sample_weight is None:
        return None
    values = sample_weight if isinstance(sample_weight, Tensor) else np.asarray(sample_weight)
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiub":
            raise ValueError(f"`sample_weight` should be numbers. Found dtype {values.dtype}.")
        values = from_numpy(values.astype(np.float64))
    weights = values.to(like.device, torch.float64)
    if weights.ndim == 0 and isinstance(sample_weight, Real):
        weights = weights.expand(n_samples)
    if weights.shape != (n_samples,):
        raise ValueError(f"`sample_weight` should have shape ({n_samples},). Found {tuple(weights.shape)}.")
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        row = int((~(weights.isfinite() & (weights >= 0))).nonzero()[0])
        raise ValueError(
            f"`sample_weight` should be finite and not negative. Found {float(weights[row])} in row {row}."
        )
    if not bool(weights.any()):
        raise ValueError("`sample_weight` should have a positive entry. Found sample_weight of zeros only.")
    return weights


def generator_of(random_state: RandomState, device: torch.device) -> torch.Generator:
    """Return the generator of a `random_state`.

    An integer seeds a new one; so does a number drawn from a RandomState, which is NumPy's global one for None: as
    elsewhere in scikit-learn, ``numpy.random.seed`` then decides, and each call draws anew. A torch generator is used
    as it is. Torch's global generator is never touched.

    Raises:
        ValueError: If `random_state` is anything else, or a negative integer.
    """
    if isinstance(random_state, torch.Generator):
        return random_state
    if random_state is None:
        random_state = np.random.mtrand._rand
    if isinstance(random_state, np.random.RandomState):
        seed: int | None = int(random_state.randint(2**31 - 1))
    else:
        seed = _index(random_state)
    if seed is None or seed < 0:
        raise ValueError(
            "`random_state` should be an integer from 0, a numpy.random.RandomState, a torch.Generator or None. "
            f"Found {random_state!r}."
        )
    return torch.Generator().manual_seed(seed)


def integer(name: str, value: object, least: int) -> int:
    """Return an integer of any kind, NumPy's too, as Python's; raise a ValueError if it is none or too small."""
    number = _index(value)
    if number is None or number < least:
        expected = "a positive integer" if least else "an integer from 0"
        raise ValueError(f"`{name}` should be {expected}. Found {value!r}.")
    return number


def _index(value: object) -> int | None:
    """Return Python's integer of an integer that is no truth value; None for anything else."""
    return int(value) if isinstance(value, int | np.integer) and type(value) is not bool else None


def not_negative(name: str, value: object) -> float:
    """Return a finite number from 0; raise a ValueError for anything else."""
    number = float(value) if isinstance(value, int | float | np.number) and type(value) is not bool else -1.0
    if not 0 <= number < math.inf:
        raise ValueError(f"`{name}` should be finite and not negative. Found {value!r}.")
    return number
