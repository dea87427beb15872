"""The gradient of a program with blocks as a vector field: is it the gradient of a loss? Is its fixed point stable?

A blocked gradient g need not be the gradient of any loss. It is the gradient of a loss exactly if its Jacobian
J = dg/dtheta is symmetric everywhere. Gradient descent with small steps returns to a fixed point exactly if the
eigenvalues of -J have negative real parts. J differentiates the blocked values although g does not: the blocks are
closed at first order and open at second. A plain `detach` is closed at both orders.

n numbers in all parameters together, J (n, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction

from toolkit._checks import integer
from toolkit._random import seeded_generator
from toolkit.gradients._answers import sentence
from toolkit.gradients._gates import GateBoard
from toolkit.gradients._nodes import EVERY_BLOCK, roots_in
from toolkit.gradients._program import (
    CONSTANT,
    NO_PATH,
    Parameters,
    Program,
    differentiated,
    keeping_selected,
    nodes_of,
    reached,
)
from toolkit.gradients.verdict import equal

__all__ = ["Field", "field_jacobian"]

# A dense Jacobian takes a backward pass for every number, and here 32 MB.
_MOST_NUMBERS_DENSE = 2000

# The derivatives of these nodes hold the mean and the variance of a batch, or of a row, constant:
# pytorch/pytorch#175754 and #186256.
_WRONG_AT_ORDER_THREE = frozenset(
    f"{norm}BackwardBackward0"
    for norm in ("NativeLayerNorm", "NativeBatchNorm", "BatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
)

# One random vector shows an asymmetry of J with probability 1; more vectors guard against near null spaces.
_PROBES = 4


class Field:
    """The Jacobian J of a blocked gradient at one point. Made by `field_jacobian`.

    Parameters are flattened and joined in their order. Matrices are computed at first use. For many parameters use the
    products `jvp` and `vjp`, and the methods based on them.

    Attributes:
        names: The parameters.
        size: n.
        gradient: The blocked gradient g, (n,).
    """

    names: list[str]
    size: int
    gradient: Tensor

    def __init__(self, loss: Callable[[], Tensor], params: Parameters) -> None:
        """Run `loss` once; see `field_jacobian`."""
        self._program = program = Program(loss, params)
        if program.given is None:
            raise TypeError("`params` should be a module, a tensor, or a dict or iterable of these. Found None.")
        named = program.given
        for name, parameter in named.items():
            if parameter.is_complex():
                raise ValueError(f"`params` should be real. Found {parameter.dtype} at {name!r}.")
        self.names = list(named)
        self._params = list(named.values())
        self._versions = [parameter._version for parameter in self._params]
        self._board = GateBoard(records=True)
        plain = program.answer(named, around=False)
        if plain.constant:
            raise ValueError(CONSTANT)
        with _telling(), program.aside() as moved, self._board.forward():
            value = program.value()
        if self._board.pierced:
            raise ValueError(
                "`loss` should not switch the recording on inside of a region: which of its values move is not "
                f"known then. Found it in {sorted(self._board.pierced)}."
            )
        if self._board.forward_mode:
            raise ValueError(
                "`loss` should not take a forward-mode derivative of a region: its graph is not recorded. Found one "
                f"of {sorted(self._board.forward_mode)}: use `stop_gradient` on the results of the region instead."
            )
        if self._board.overwritten:
            raise ValueError(
                "`loss` should not change the memory of a blocked value in place. Found that it does: "
                f"{', '.join(map(repr, sorted(self._board.overwritten)))}."
            )
        if not reached(value, named):
            raise ValueError(NO_PATH)
        nodes = nodes_of(value)
        self._refuse_wrong_second_derivatives(nodes)
        # Torch loses the third derivative of an embedding with sparse gradients.
        self._is_dense = not any(getattr(node, "_saved_sparse", False) for node in nodes)
        with _telling(), self._passing(()):
            self._board.close_regions(roots_in(value))
            recorded = differentiated(value, named)  # its bits differ from those with a separate graph
            found = torch.autograd.grad(value, self._params, create_graph=True, allow_unused=True)
            self._gradient = self._joined(found)
            self.gradient = self._gradient.detach()
        if value.item() != plain.loss or not all(equal(recorded[name], plain.gradients[name]) for name in named):
            raise ValueError(
                "`loss` should have the same gradient when its blocks are recorded. Found another one than in a plain "
                "run: it is random, changes values shared with a region, or has hooks on blocked values."
            )
        if moved.values:
            raise ValueError(
                "`loss` should not change the values of tensors that were there before. Found that it does."
            )
        self.size = len(self.gradient)

    def jvp(self, vector: Tensor) -> Tensor:
        """Return J v, (n,), the derivative of the gradient along v.

        Raises:
            TypeError: If `vector` is not a tensor.
            ValueError: If `vector` does not have shape (n,), if n is more than 2000 and a gradient is sparse, or if an
                operation of the program has no second derivative in torch.
            RuntimeError: If a parameter was modified since the field was made.
        """
        if not self._is_dense:
            self._check(vector)
            return self.jacobian @ vector
        probe, pulled = self._pullback
        return self._product(pulled, [probe], vector)

    def vjp(self, vector: Tensor) -> Tensor:
        """Return J^T v, (n,).

        Raises:
            TypeError: If `vector` is not a tensor.
            ValueError: If `vector` does not have shape (n,), or if an operation of the program has no second derivative
                in torch.
            RuntimeError: If a parameter was modified since the field was made.
        """
        return self._product(self._gradient, self._params, vector)

    @cached_property
    def jacobian(self) -> Tensor:
        """J, (n, n): row i has the derivatives of component i of the gradient.

        Raises:
            ValueError: If n is more than 2000.
        """
        if self.size > _MOST_NUMBERS_DENSE:
            raise ValueError(
                f"`params` should have at most {_MOST_NUMBERS_DENSE} numbers for a dense Jacobian. Found {self.size}: "
                "use `jvp`, `vjp`, `estimate_asymmetry` or `leading_eigenvalues`."
            )
        return torch.stack(
            [self.vjp(row) for row in torch.eye(self.size, dtype=self.gradient.dtype, device=self.gradient.device)]
        )

    @property
    def asymmetry(self) -> float:
        """``|J - J^T| / |J|``, Frobenius norms: 0 for the gradient of a loss, 2 for a pure rotation; 0 if J is 0.

        Raises:
            ValueError: If n is more than 2000; `estimate_asymmetry` has no limit.
        """
        norm = self.jacobian.norm().item()
        return (self.jacobian - self.jacobian.T).norm().item() / norm if norm else 0.0

    def estimate_asymmetry(self, *, probes: int = 16, generator: torch.Generator | int | None = 0) -> float:
        """Estimate `asymmetry` from products with random vectors, two for each vector.

        ``|A|^2 = E |A v|^2`` for any matrix A and standard normal v. The relative error falls as one over the square
        root of `probes`; 0 is found exactly.

        Args:
            probes: The number of vectors.
            generator: Draws the vectors on the CPU. An integer seeds a new generator; None: torch's global generator.

        Raises:
            ValueError: If `probes` is not positive.
            RuntimeError: If a parameter was modified since the field was made.

        References:
            Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1990.
        """
        probes = integer("probes", probes)
        draws = seeded_generator(generator)
        difference = norm = 0.0
        for _ in range(probes):
            vector = torch.randn(self.size, generator=draws, dtype=torch.float64, device=draws.device).to(self.gradient)
            pushed = self.jvp(vector)
            difference += (pushed - self.vjp(vector)).square().sum().item()
            norm += pushed.square().sum().item()
        return (difference / norm) ** 0.5 if norm else 0.0

    @cached_property
    def is_gradient_field(self) -> bool:
        """Whether J is symmetric to rounding at this point, by `estimate_asymmetry`.

        False: g is the gradient of no loss. True does not prove the converse; check other points as well.
        """
        return self.estimate_asymmetry(probes=_PROBES) <= self._precision

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of -J, complex, (n,), by falling real part: growth rates under gradient flow ``-g``.

        Raises:
            ValueError: If n is more than 2000; `leading_eigenvalues` has no limit.
        """
        return _by_growth(torch.linalg.eigvals(-self.jacobian))

    def leading_eigenvalues(self, k: int = 6) -> Tensor:
        """Return the `k` eigenvalues of -J with the largest real parts, complex, (k,), without a matrix.

        They are found by Lanczos iteration for a gradient field and by Arnoldi iteration otherwise; almost all
        eigenvalues of a small J are computed from the matrix.

        Args:
            k: The number of eigenvalues.

        Raises:
            ValueError: If `k` is not between 1 and n.
            RuntimeError: If the iteration does not converge, or a parameter was modified since the field was made.

        References:
            Lehoucq, Sorensen and Yang, "ARPACK users' guide", 1998, through `scipy.sparse.linalg`.
        """
        k = integer("k", k, 1, self.size)
        if k >= self.size - 1:
            return self.eigenvalues[:k]
        import scipy.sparse.linalg  # importing takes a third of a second, only needed here

        find, which = (scipy.sparse.linalg.eigsh, "LA") if self.is_gradient_field else (scipy.sparse.linalg.eigs, "LR")
        start = np.random.default_rng(0).standard_normal(self.size)
        found = find(self._operator, k, which=which, v0=start, tol=self._precision, return_eigenvectors=False)
        return _by_growth(torch.from_numpy(np.asarray(found, dtype=np.complex128)))

    @property
    def stable(self) -> bool:
        """Whether gradient descent with small steps returns to this point if it is a fixed point.

        A growth rate of 0 up to rounding counts as unstable: along its direction the gradient does not return the
        parameters.
        """
        rates = self.eigenvalues if self.size <= _MOST_NUMBERS_DENSE else self.leading_eigenvalues(1)
        return rates[0].real.item() < -self._precision * self._scale

    def __repr__(self) -> str:
        return f"Field({self.size} numbers in {len(self.names)} parameters, |g| = {self.gradient.norm().item():.3g})"

    def __str__(self) -> str:
        rates = self.eigenvalues if self.size <= _MOST_NUMBERS_DENSE else self.leading_eigenvalues(1)
        kind = "perhaps the gradient of a loss" if self.is_gradient_field else "the gradient of no loss"
        return (
            f"{self.size} parameters, |g| = {self.gradient.norm().item():.3g}; {kind}, asymmetry "
            f"{self.estimate_asymmetry():.3g}; {'stable' if self.stable else 'not stable'}, growth rate "
            f"{rates[0].real.item():.3g}"
        )

    # --- how it is done ------------------------------------------------------------------------------------------

    def _refuse_wrong_second_derivatives(self, nodes: Iterable[Any]) -> None:
        """Raise ValueError for a graph whose second derivative torch computes without an error, and wrongly."""
        found = "a hook, which acts on it too" if self._board.hooked else ""
        for node in nodes:
            leaf, function = getattr(node, "variable", None), getattr(node, "_forward_cls", type(node))
            code = getattr(getattr(function, "backward", None), "__code__", None)
            if (leaf is not None and leaf._backward_hooks) or function is BackwardHookFunction:
                found = "a hook, which acts on it too"
            elif type(node).__name__ == "WeightNormInterfaceBackward0":  # in torch 2.13, `gradgradcheck` rejects it
                found = "torch's weight normalization, whose own is wrong"
            elif type(node).__name__ in _WRONG_AT_ORDER_THREE and getattr(node, "_saved_train", True):
                found = "a derivative in the program of layer or batch normalization, whose third torch has wrong"
            elif code is not None and code.co_filename == torch.autograd.function.__file__:
                found = f"`{function.__name__}`, which is marked as once_differentiable"
        if found:
            raise ValueError(f"`loss` should have a second derivative. Found {found}.")

    @contextmanager
    def _passing(self, open: Collection[str]) -> Iterator[None]:
        """Differentiate with `open` open, without side effects, in this thread, so that a checkpoint sees the gates."""
        with self._program.aside(runs=False), keeping_selected(), self._board.backward(open):
            yield

    @cached_property
    def _pullback(self) -> tuple[Tensor, Tensor]:
        """A vector u and J^T u, which is linear in u: its derivative with respect to u, weighted with v, is J v."""
        probe = torch.zeros_like(self.gradient, requires_grad=True)
        return probe, self._product(self._gradient, self._params, probe, create_graph=True)

    def _product(self, outputs: Tensor, inputs: list[Tensor], vector: Tensor, *, create_graph: bool = False) -> Tensor:
        self._check(vector)
        if not outputs.requires_grad:
            return torch.zeros_like(self.gradient)
        with self._passing(EVERY_BLOCK):
            try:
                found = torch.autograd.grad(
                    outputs, inputs, vector, retain_graph=True, create_graph=create_graph, allow_unused=True
                )
            except RuntimeError as error:  # from an operation of torch, which raises it as late as here
                if not isinstance(error, NotImplementedError) and "not implemented" not in str(error):
                    raise
                raise ValueError(f"`loss` should have a second derivative. Found: {sentence(error)}.") from error
            return self._joined(found, inputs)

    def _joined(self, gradients: Any, inputs: list[Tensor] | None = None) -> Tensor:
        pairs = zip(gradients, self._params if inputs is None else inputs, strict=True)
        return torch.cat([(torch.zeros_like(i) if g is None else g).to_dense().reshape(-1) for g, i in pairs])

    def _check(self, vector: Tensor) -> None:
        if not isinstance(vector, Tensor):
            raise TypeError(f"`vector` should be a tensor of shape ({self.size},). Found {type(vector).__name__}.")
        if vector.shape != self.gradient.shape:
            raise ValueError(f"`vector` should have shape ({self.size},). Found {tuple(vector.shape)}.")
        for name, parameter, version in zip(self.names, self._params, self._versions, strict=True):
            if parameter._version != version:
                raise RuntimeError(f"`{name}` should be as it was in the field. Found it modified: make another field.")

    @cached_property
    def _precision(self) -> float:
        """The relative bound of rounding, with room for long sums."""
        coarsest: float = max(torch.finfo(parameter.dtype).eps for parameter in self._params)
        return math.sqrt(coarsest * math.sqrt(coarsest))

    @cached_property
    def _scale(self) -> float:
        """The approximate size of J."""
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(_PROBES, self.size, generator=generator, dtype=torch.float64, device=generator.device).to(
            self.gradient
        )
        norms: list[float] = [self.jvp(vector).norm().item() for vector in vectors]
        return max(norms)

    @property
    def _operator(self) -> Any:
        def product(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            return lambda vector: (
                -function(torch.from_numpy(vector.reshape(-1)).to(self.gradient)).double().cpu().numpy()
            )

        shape = (self.size, self.size)
        import scipy.sparse.linalg

        return scipy.sparse.linalg.LinearOperator(shape, product(self.jvp), product(self.vjp), dtype=np.float64)


def field_jacobian(loss: Callable[[], Tensor], params: Parameters) -> Field:
    """Differentiate the blocked gradient of `loss` as a vector field: blocks closed at first order, open at second.

    Quantities held constant without a block, by a bare ``detach`` or an inner derivative without ``create_graph``, stay
    constant in J too: make them blocks. The ``backward`` of a custom autograd function is taken for its derivative at
    both orders. If it is not, as in a gradient reversal, write the function with a block. The program's state is
    restored, as in `compare`.

    Args:
        loss: Runs the program and returns its loss, a real scalar.
        params: A module, a tensor, or a dict or iterable of these.

    Raises:
        TypeError: If `loss` does not return a tensor, or `params` holds other objects.
        ValueError: If the loss is not a real scalar, is NaN or has no gradient. If there is no real parameter to
            differentiate by. If the program turns recording on inside of a region, or takes a forward-mode derivative
            of a region. If torch has no second derivative of a part (nested tensors, hooks, weight normalization,
            once_differentiable), or no third derivative (the derivative of layer or batch normalization).
        RuntimeError: If the program fails while its blocks are recorded.

    Example:
        >>> w = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
        >>> def loss():  # temporal differences between two states of value w and 2 w, without reward
        ...     return (w - stop_gradient(0.9 * 2 * w, "doc.next_value")).square().sum() / 2
        >>> field = field_jacobian(loss, w)
        >>> round(field.jacobian.item(), 3), round(field.eigenvalues.real.item(), 3), field.stable  # they diverge
        (-0.8, 0.8, False)
    """
    return Field(loss, params)


@contextmanager
def _telling() -> Iterator[None]:
    """Tell an error of the recorded program, which a plain run does not raise."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"`loss` should run while its blocks are recorded. Found: {sentence(error)}.") from error


def _by_growth(eigenvalues: Tensor) -> Tensor:
    return eigenvalues[torch.argsort(eigenvalues.real, descending=True)]
