"""Readers of the inputs of estimators, and writers of results in the same form: array or tensor, dtype, device.

Computations of few numbers take arrays in place of tensors (`as_arrays`).

N samples, D features.
"""

from __future__ import annotations

import itertools
import math
import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolkit._checks import index

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

Array: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.float32] | npt.NDArray[np.int64] | Tensor

# Samples (B, D) and their weights (B,), or None if all are 1.
Chunk: TypeAlias = tuple[Tensor, Tensor | None]

# Returns all samples, chunk by chunk, at each call.
Rows: TypeAlias = Callable[[int], Iterator[Chunk]]

# Bytes of a memory-mapped array that are read at once.
_PIECE_BYTES = 2**23

# Numbers in the largest array of a computation up to which NumPy is the faster: on thirty data sets it took half of
# torch's time on average, and as long near this limit.
_FEW = 2**17

RandomState: TypeAlias = int | np.random.RandomState | torch.Generator | None


@dataclass(frozen=True)
class Form:
    """The form of results.

    Attributes:
        numpy: Whether results are arrays instead of tensors.
        dtype: Floating-point dtype of results: float32 or float64.
        device: Device of results.
    """

    numpy: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Array) -> Form:
        """Return the form of an array or a tensor of numbers."""
        if isinstance(x, Tensor):
            return cls(False, x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float64, x.device)
        return cls(
            True, torch.float32 if x.dtype.newbyteorder("=") == np.float32 else torch.float64, torch.device("cpu")
        )

    def keep(self, **attributes: Tensor) -> dict[str, Array]:
        """Return fitted attributes in this form.

        Raises:
            ValueError: If the dtype cannot hold an attribute.
        """
        kept = {name: self.give(values) for name, values in attributes.items()}
        for name, values in kept.items():
            if not (np.isfinite(values) if isinstance(values, np.ndarray) else values.isfinite()).all():
                raise ValueError(
                    f"`X` should have a scale near 1, or be float64. Found `{name}` up to "
                    f"{float(attributes[name].abs().max()):.3g}, which {self.dtype} cannot hold."
                )
        return kept

    def give(self, values: Tensor) -> Array:
        """Return values in this form; integers and booleans keep their dtype."""
        if values.is_floating_point():
            values = values.to(self.dtype)
        values = values.to(self.device)
        # A separate copy: a change of one attribute must not reach another.
        values = values.clone(memory_format=torch.contiguous_format)
        return values.numpy() if self.numpy else values


def refuse_masked(name: str, values: object, hint: str = "") -> None:
    """Raise a ValueError for an array with masked values, whose masks NumPy's and torch's conversions drop."""
    if isinstance(values, np.ma.MaskedArray) and (count := int(np.ma.getmaskarray(values).sum())):
        raise ValueError(f"`{name}` should have no masked values. Found {count}.{hint}")


def read(
    estimator: BaseEstimator, x: object, *, reset: bool, missing: bool, least: int = 1, hint: str = ""
) -> tuple[Tensor, Form]:
    """Return samples as a tensor of float32 or float64, without a copy where possible, and their form.

    Args:
        estimator: Stores the number and the names of the features, or provides them.
        x: (N, D): a tensor, an array, or any array-like of scikit-learn.
        reset: Whether to learn the features.
        missing: Whether NaN, or a value that is masked, is allowed.
        least: The fewest samples.
        hint: Ends the error for NaN.

    Raises:
        TypeError: If `x` is sparse or complex.
        ValueError: If `x` has a wrong shape or other features, or is not finite.
    """
    from sklearn.utils.validation import validate_data

    if isinstance(x, np.ma.MaskedArray):
        if not missing:
            refuse_masked("X", x, hint)
        hidden, x = np.ma.getmaskarray(x), np.ma.getdata(x)
        x = np.where(hidden, x.dtype.type(np.nan) if x.dtype.kind == "f" else np.nan, x) if missing else x
    if not isinstance(x, Tensor):
        finite = "allow-nan" if missing else True
        types = [np.float64, np.float32]
        options: dict[str, Any] = {"dtype": types, "ensure_all_finite": finite, "ensure_min_samples": least}
        # scikit-learn's check of an array takes longer than the prediction of a sample.
        if type(x) is np.ndarray and x.dtype in types and x.ndim == 2 and len(x) >= least and x.shape[1] > 0:
            options = {"skip_check_array": True} if np.isfinite(x).all() else options
        try:
            array = validate_data(estimator, x, reset=reset, **options)
        except ValueError as error:
            if "contains NaN" not in str(error):
                raise
            raise ValueError(f"Input X contains NaN.{hint}") from None
        return from_numpy(array), Form.of(array)
    if x.layout is not torch.strided or x.is_complex():
        raise TypeError(f"`X` should be a dense tensor of real numbers. Found {x.layout}, {x.dtype}.")
    if x.ndim != 2 or len(x) < least or x.shape[1] == 0:
        raise ValueError(f"`X` should have shape (N, D), at least ({least}, 1). Found {tuple(x.shape)}.")
    form = Form.of(x)
    x = x.to(form.dtype).resolve_neg()  # NumPy cannot read a pending sign
    allowed = ~x.isinf() if missing else x.isfinite()
    if not bool(allowed.all()):
        row = int((~allowed).any(1).nonzero()[0])
        hint = hint if bool(x.isnan().any()) else ""
        raise ValueError(f"`X` should be finite. Found {x[row].tolist()} in row {row}.{hint}")
    validate_data(estimator, x, reset=reset, skip_check_array=True)
    return x, form


def from_numpy(array: npt.NDArray[np.floating]) -> Tensor:
    """Return a tensor on the memory of an array, which may be read-only: callers do not write to it."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    if array.flags.writeable:
        return torch.from_numpy(np.asarray(array))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(np.asarray(array))


def library(values: object) -> Any:
    """Return NumPy for arrays and torch for tensors, to call the functions that have the same name in both."""
    return np if isinstance(values, np.ndarray) else torch


def as_arrays(size: int, *values: Tensor | None) -> list[Any]:
    """Return the tensors, as NumPy arrays if a computation of `size` numbers is faster by NumPy's cheaper calls.

    Unlike torch, NumPy warns of infinities and NaN; ``np.errstate(all="ignore")`` turns the warnings off.
    """
    known = [value for value in values if value is not None]
    if size > _FEW or any(value.device.type != "cpu" or value.requires_grad for value in known):
        return list(values)
    return [None if value is None else value.resolve_neg().numpy() for value in values]


def as_tensor(values: Any) -> Tensor:
    """Return an array as a tensor, and a tensor unchanged, on its device."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def doubles(values: Any) -> Any:
    """Return a tensor or an array in float64."""
    return values.double() if isinstance(values, Tensor) else values.astype(np.float64, copy=False)


@dataclass(frozen=True)
class Chunks:
    """Samples that are read again for each step, and are never in memory together.

    Attributes:
        again: Returns the checked chunks (B, D) with their weights (B,) or None, at each call.
        form: The form of the first chunk; the others are converted to its dtype and device.
        n_samples: Number of samples, N.
    """

    again: Callable[[], Iterator[Chunk]]
    form: Form
    n_samples: int

    def rows(self, length: int) -> Iterator[Chunk]:
        """Yield the chunks, cut to a largest length."""
        for x, weights in self.again():
            yield from rows_of(x, weights)(length)

    def choose(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Return at most `count` samples, as `choose` does, in one pass."""
        every = self.n_samples <= count
        samples, weights, _ = reservoir(self.again(), count, generator, every=every)
        samples, weights = samples[weights > 0], weights[weights > 0]
        return samples, weights if every else None


def choose(
    x: Tensor, sample_weight: Tensor | None, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Return at most `count` samples, drawn without replacement by weight, in their order, and their weights.

    If there are at most `count` samples, all are returned with their weights; otherwise the draw has used up the
    weights.

    References:
        Efraimidis & Spirakis, "Weighted random sampling with a reservoir", 2006, algorithm A.
    """
    if len(x) <= count:
        return x, sample_weight
    weights = all_weights(x, sample_weight)
    return x[_keys(weights, generator).topk(count, largest=False).indices.sort().values], None


def all_weights(x: Tensor, sample_weight: Tensor | None) -> Tensor:
    """Return the weights of the samples (N,), float64; all 1 for None."""
    return x.new_ones(len(x), dtype=torch.float64) if sample_weight is None else sample_weight.double()


def reservoir(
    chunks: Iterable[Chunk], count: int, generator: torch.Generator | None, *, every: bool
) -> tuple[Tensor, Tensor, int]:
    """Return at most `count` samples, drawn as by `choose` in one pass, their weights, and how many have a weight.

    Args:
        chunks: Samples and weights.
        count: The most samples.
        generator: Randomness. None is torch's global generator.
        every: Whether there are at most `count` samples with a weight. Nothing is drawn then, so the start is the same
            as for the samples in one piece.
    """
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    n_samples = 0
    for x, weights in chunks:
        w = all_weights(x, weights)
        keys = torch.zeros_like(w) if every else _keys(w, generator)
        # Copies: a source may fill the same memory again.
        kept.append((torch.where(w > 0, keys, math.inf), x.clone(), w.clone()))
        n_samples += int((w > 0).sum())
        if sum(len(keys) for keys, _, _ in kept) > 2 * count:
            kept = [_smallest(kept, count)]
    _, samples, weights = _smallest(kept, count)
    return samples, weights, n_samples


def _keys(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return exponential draws whose rates are the weights; the smallest ones select a sample by weight."""
    device = weights.device if generator is None else generator.device
    draws = torch.rand(len(weights), generator=generator, device=device, dtype=torch.float64)
    return -draws.to(weights.device).log() / weights


def _smallest(kept: list[tuple[Tensor, Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, samples and weights of at most `count` samples, those with the smallest keys: a reservoir."""
    keys, samples, weights = (torch.cat(parts) for parts in zip(*kept, strict=True))
    # In their order, so that the result does not depend on the sizes of the chunks.
    order = keys.argsort(stable=True)[:count].sort().values
    return keys[order], samples[order], weights[order]


def read_chunks(
    estimator: BaseEstimator, source: object, sample_weight: object = None, *, reset: bool, missing: bool
) -> Chunks:
    """Return samples in chunks, after one pass that checks all of them.

    Args:
        estimator: As in `read`.
        source: A source for which `is_chunked` is true. A chunk is a matrix, or a pair or list of a matrix and its
            weights, such as a data loader's batch.
        sample_weight: (N,) for all chunks, if they have no weights.
        reset: As in `read`, by the first chunk.
        missing: Whether NaN is allowed.

    Raises:
        TypeError: If the source can be read only once.
        ValueError: If there is no sample; and as for `read`, for each chunk.
    """
    if hasattr(source, "__next__"):
        raise TypeError(
            "`X` should be chunks that can be read again for each step: a list, a DataLoader, or a function that "
            f"returns a new iterator. Found {type(source).__name__}."
        )
    common = None if sample_weight is None else read_weights(sample_weight, None, torch.empty(0, device="cpu"))
    form: Form | None = None
    learn = reset

    def again() -> Iterator[Chunk]:
        nonlocal form, learn
        first = 0
        for chunk in pieces_of(source):
            x, own = parts_of(chunk)
            if hasattr(x, "__len__") and len(x) == 0:
                continue
            samples, found = read(estimator, x, reset=learn, missing=missing)
            form, learn = form or found, False
            samples = samples.to(form.device, form.dtype)
            last = first + len(samples)
            weights = None if common is None else common[first:last]
            yield samples, read_weights(own if weights is None else weights, len(samples), samples, total=False)
            first = last
        if form is None:
            raise ValueError("`X` should have at least one sample. Found no chunk that has one.")
        if common is not None and len(common) != first:
            raise ValueError(f"`sample_weight` should have shape ({first},). Found {tuple(common.shape)}.")

    n_samples = sum(len(x) if w is None else int((w > 0).sum()) for x, w in again())
    if not n_samples:
        raise ValueError("`sample_weight` should not be all 0. Found no sample with a weight.")
    assert form is not None
    return Chunks(again, form, n_samples)


def pieces_of(source: object) -> Iterable[object]:
    """Return the chunks of a source from its beginning; those of a file are copies, which bounds the memory."""
    if isinstance(source, np.memmap):
        return _pieces_of_file(source)
    return source() if callable(source) else cast("Iterable[object]", source)


def _pieces_of_file(array: np.memmap[Any, Any]) -> Iterator[object]:
    """Yield copies of parts of a file, and release its pages, which would otherwise fill the memory."""
    step = max(1, _PIECE_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        yield np.array(array[first : first + step])
        give_back_pages(array)


def _is_matrix(chunk: object) -> bool:
    return getattr(chunk, "ndim", None) == 2


def _is_pair(chunk: object) -> bool:
    return isinstance(chunk, list | tuple) and bool(chunk) and _is_matrix(chunk[0])


def read_parts(estimator: BaseEstimator, x: object, *, missing: bool, hint: str = "") -> tuple[Iterable[Tensor], Form]:
    """Return samples for a fitted estimator, in their parts, and their form (see `read`)."""
    if is_chunked(x):
        chunks = read_chunks(estimator, x, reset=False, missing=missing)
        return (part for part, _ in chunks.again()), chunks.form
    samples, form = read(estimator, x, reset=False, missing=missing, hint=hint)
    return [samples], form


def weights_of_parts(estimator: BaseEstimator, x: object, *, missing: bool) -> Tensor | None:
    """Return the weights (N,) in the chunks, or None if the chunks have no weights."""
    if not is_chunked(x):
        return None
    parts = [(w, len(part)) for part, w in read_chunks(estimator, x, reset=False, missing=missing).again()]
    if all(w is None for w, _ in parts):
        return None
    return torch.cat([torch.ones(n, dtype=torch.float64, device="cpu") if w is None else w.cpu() for w, n in parts])


def is_chunked(x: object) -> bool:
    """Return whether samples come in chunks: from a function, a list of matrices, or another iterable."""
    if isinstance(x, Tensor):
        return False
    if isinstance(x, list | tuple):
        return bool(x) and all(_is_matrix(chunk) or _is_pair(chunk) for chunk in x)
    if callable(x) and not hasattr(x, "__array__"):
        return True
    random_access = hasattr(x, "__getitem__") or hasattr(x, "__array__") or hasattr(x, "shape")
    return hasattr(x, "__iter__") and not random_access


def read_weights(sample_weight: object, n_samples: int | None, like: Tensor, *, total: bool = True) -> Tensor | None:
    """Return the weights of the samples, (N,) float64 on the device of the samples, or None for equal ones.

    Args:
        sample_weight: (N,), one number for all, or None.
        n_samples: N, or None if it is not known yet.
        like: A tensor on the device of the result.
        total: Whether these are all weights, so that at least one must be positive.

    Raises:
        ValueError: If the number of weights is not N, a weight is negative, masked or not finite, or all are 0.
    """
    if sample_weight is None:
        return None
    refuse_masked("sample_weight", sample_weight)
    values = sample_weight if isinstance(sample_weight, Tensor) else np.asarray(sample_weight)
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiub":
            raise ValueError(f"`sample_weight` should be numbers. Found dtype {values.dtype}.")
        values = from_numpy(values.astype(np.float64))
    weights = values.to(like.device, torch.float64)
    if weights.ndim == 0 and n_samples is not None:
        weights = weights.expand(n_samples)
    if weights.ndim != 1 or len(weights) != (len(weights) if n_samples is None else n_samples):
        raise ValueError(
            f"`sample_weight` should have shape ({'N' if n_samples is None else n_samples},). "
            f"Found {tuple(weights.shape)}."
        )
    sound = weights.isfinite() & (weights >= 0)
    if not bool(sound.all()):
        row = int((~sound).nonzero()[0])
        raise ValueError(
            f"`sample_weight` should be finite and not negative. Found {float(weights[row])} in row {row}."
        )
    if total and not bool(weights.any()):
        raise ValueError("`sample_weight` should have a positive entry. Found sample_weight of zeros only.")
    return weights


def generator_of(random_state: RandomState, device: torch.device | None = None) -> torch.Generator:
    """Return the generator of a `random_state`.

    An integer seeds a new generator. From a RandomState, a drawn number seeds the new generator; None means NumPy's
    global RandomState: as elsewhere in scikit-learn, ``numpy.random.seed`` then decides, and each call draws again. A
    torch generator is used directly. Torch's global generator is never touched.

    A new generator draws on the CPU for any `device` of the samples, so that a seed gives the same start everywhere.

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
        seed = index(random_state)
    if seed is None or seed < 0:
        raise ValueError(
            "`random_state` should be an integer from 0, a numpy.random.RandomState, a torch.Generator or None. "
            f"Found {random_state!r}."
        )
    return torch.Generator().manual_seed(seed)


def rows_of(x: Tensor, sample_weight: Tensor | None) -> Rows:
    """Return a function that cuts a tensor (N, D), and its weights (N,), into chunks."""

    def rows(length: int) -> Iterator[Chunk]:
        pieces = max(1, math.ceil(len(x) / length))
        parts = x.tensor_split(pieces)
        weights = itertools.repeat(None) if sample_weight is None else sample_weight.tensor_split(pieces)
        yield from zip(parts, weights, strict=False)

    return rows


def parts_of(piece: Any) -> tuple[Any, Any]:
    """Return the samples of a chunk, and its weights or None.

    Raises:
        TypeError: If the weights are integers: a data loader's second part is often the labels.
        ValueError: If there are more than two parts.
    """
    if not isinstance(piece, tuple | list):
        return piece, None
    if len(piece) not in (1, 2):
        raise ValueError(f"A chunk should be samples, or a pair of samples and weights. Found {len(piece)} parts.")
    if len(piece) == 1:
        return piece[0], None
    values, weights = piece
    integers = isinstance(weights, Tensor) and not weights.is_floating_point()
    if integers or (isinstance(weights, np.ndarray) and weights.dtype.kind in "iub"):
        raise TypeError(f"The weights of a chunk should be floating-point numbers, not labels. Found {weights.dtype}.")
    return values, weights


def give_back_pages(array: np.memmap[Any, Any]) -> None:
    """Tell the system that the pages of a file need not stay in memory.

    A private mapping is left alone, because it would lose its changes.
    """
    mapping = getattr(array, "_mmap", None)
    if mapping is not None and getattr(array, "mode", "c") != "c" and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
