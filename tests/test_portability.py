"""The tests that rounding threatens most, on two machines unlike this one; and that these are other machines at all."""

import subprocess
import sys

import pytest
import torch
from machines import MACHINES, RISKIEST, marked, numerical
from reversed_sums import ReversedSums, reversed_sums

from toolkit.em.engine import samples as _samples


@pytest.mark.slow
@pytest.mark.parametrize("name", RISKIEST)
def test_the_riskiest_tests_pass_on_another_machine(name, tmp_path):
    if not MACHINES[name].exists:
        pytest.skip(f"this processor cannot imitate {name}")
    process = MACHINES[name].pytest(tmp_path / "log", "-m", "portable", *marked())
    try:
        assert process.wait() == 0, (tmp_path / "log").read_text(errors="replace")[-5000:]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MACHINES if MACHINES[name].capability])
def test_torch_takes_it_for_that_processor(name):
    machine = MACHINES[name]
    if not machine.exists:
        pytest.skip(f"this processor cannot imitate {name}")
    said = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"],
        env={**machine.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == machine.capability


def test_every_file_that_adds_up_is_run():
    assert set(marked()) <= set(numerical())
    assert len(numerical()) > 50


# So many numbers that rounding by chance to the same result each time is out of the question.
X = torch.randn(200, 1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(1001, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
B = torch.ones(5, dtype=torch.float64)
SUMS = {
    "sum": lambda: torch.stack([row.sum() for row in X]),
    "sum of rows": lambda: X.sum(1),
    "mean": lambda: torch.stack([row.mean() for row in X]),
    "mean of rows": lambda: X.mean(1, keepdim=True),
    "variance": lambda: X.var(1),
    "norm": lambda: X.norm(dim=1),
    "vector norm": lambda: torch.stack([torch.linalg.vector_norm(row) for row in X]),
    "logsumexp": lambda: X.logsumexp(1),
    "softmax": lambda: X.softmax(1),
    "log softmax": lambda: X.log_softmax(1),
    "matmul": lambda: X @ Y,
    "linear": lambda: torch.nn.functional.linear(X, Y.mT, B),
    "einsum": lambda: torch.einsum("ij,jk->ik", X, Y),
    "batched": lambda: torch.baddbmm(torch.zeros(2, 200, 5, dtype=X.dtype), X.expand(2, -1, -1), Y.expand(2, -1, -1)),
    "vector": lambda: X @ Y[:, 0],
    "dot": lambda: torch.stack([row @ Y[:, 0] for row in X]),
    "out": lambda: torch.mm(X, Y, out=torch.empty(200, 5, dtype=X.dtype)),
    "in place": lambda: torch.zeros(200, 5, dtype=X.dtype).addmm_(X, Y),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])
def test_sums_are_added_in_reverse(name, inference):
    with torch.inference_mode(inference):
        forward = SUMS[name]()
        with ReversedSums():
            backward, again = SUMS[name](), SUMS[name]()
        after = SUMS[name]()
    assert torch.equal(backward, again)
    assert torch.equal(forward, after)
    assert not torch.equal(forward, backward)
    torch.testing.assert_close(forward, backward, rtol=1e-11, atol=1e-11)


def test_gradients_are_added_in_reverse_too():
    w = Y.clone().requires_grad_()
    (forward,) = torch.autograd.grad((X @ w).tanh().sum(), w)
    with ReversedSums():
        (backward,) = torch.autograd.grad((X @ w).tanh().sum(), w)
    assert not torch.equal(forward, backward)
    torch.testing.assert_close(forward, backward, rtol=1e-11, atol=1e-13)


def test_the_data_of_em_are_cut_elsewhere():
    before = dict(_samples._CHUNK_BYTES)
    with reversed_sums():
        assert _samples._CHUNK_BYTES["cpu"] < before["cpu"]
    assert before == _samples._CHUNK_BYTES
