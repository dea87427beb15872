"""Verdicts on random networks at the edge of robustness, against exact worst margins in rational arithmetic."""

import pytest
import relu_fuzzing
import torch

from toolkit.adversarial import Verification


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_claim_is_true(first: int, capfd: pytest.CaptureFixture[str]) -> None:
    n_networks = 300 if first else 12
    verdicts = set()
    for seed in range(first, first + n_networks):
        wrong, verdict, _ = relu_fuzzing.check(seed)
        assert not wrong, seed
        assert "," not in verdict, seed
        verdicts.add(verdict)
    assert {"robust", "broken"} <= verdicts
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_the_exact_worst_margin_is_that_of_the_worst_of_many_points() -> None:
    """In float64: so the truth of the other test is true."""
    n_cases = 0
    for seed in range(40):
        case = relu_fuzzing.drawn(seed)
        epsilon, order = case.options["epsilon"], {"linf": torch.inf, "l1": 1, "l2": 2}[case.options["norm"]]
        generator = torch.Generator().manual_seed(seed)
        change = torch.rand(4000, 2, generator=generator, dtype=torch.float64) * 2 - 1
        change[1::2] /= torch.linalg.vector_norm(change[1::2], order, dim=1, keepdim=True)  # half on the boundary
        change = epsilon * change[torch.linalg.vector_norm(change, order, dim=1) <= 1]
        points = case.x.double().flatten().repeat(len(change), 1)
        points[:, list(case.free)] += change
        if case.options["bounds"] is not None:
            points = points.clamp(*(end.double().flatten() for end in case.options["bounds"]))
        logits = case.model.double()(points.reshape(-1, *case.x.shape[1:]))
        others = logits.clone()
        others[:, case.label] = -torch.inf
        margins = logits[:, case.label] - others.amax(1)
        worst, rounding = float(relu_fuzzing.exact_worst_margin(case)), 1e-9 * float(logits.abs().max())
        assert worst - rounding <= float(margins.min()), seed
        # The points are about a twentieth of the ball apart, and a margin may fall steeply at a corner.
        assert float(margins.min()) - worst <= 0.2 * float(margins.max() - margins.min()) + rounding, seed
        n_cases += epsilon > 0
    assert n_cases >= 20


def test_false_claims_are_noticed() -> None:
    """A proof that is one rounding too good, and examples outside of ball, box and mask."""
    case = relu_fuzzing.drawn(3)
    worst = relu_fuzzing.exact_worst_margin(case)
    above = torch.tensor([float(worst)], dtype=torch.float64).nextafter(torch.tensor(torch.inf, dtype=torch.float64))
    x = case.x.double()
    far = x + 2 * case.options["epsilon"] + 10
    (wrong, *more) = relu_fuzzing.complaints(case, Verification(above, above, far), worst)
    assert wrong.startswith("proved")
    assert any("outside of the ball" in complaint for complaint in more)


def test_the_ensemble_finds_the_examples_of_networks_in_both_precisions() -> None:
    found = {relu_fuzzing.drawn(seed, edge=False).x.dtype: relu_fuzzing.is_missed(seed) for seed in (30, 46)}
    assert found == {torch.float32: False, torch.float64: False}
