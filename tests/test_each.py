"""One item asks all values, and fails with each failure by its name; or each value is an item again."""

import contextlib
import inspect
from pathlib import Path

import pytest
import torch
from each import each


def test_every_value_is_tried_with_the_same_seed() -> None:
    seen = []

    @each("n", [1, 2])
    @each(("key", "value"), {"a": 3, "b": 4}.items())
    def test(n: int, key: str, value: int) -> None:
        seen.append((n, key, value, torch.rand(()).item()))

    test()
    assert [case[:3] for case in seen] == [(1, "a", 3), (1, "b", 4), (2, "a", 3), (2, "b", 4)]
    assert len({case[3] for case in seen}) == 1


def test_all_failures_are_there_by_name() -> None:
    @each("n", range(4), ids="n{}".format)
    def test(n: int) -> None:
        if n == 1:
            with pytest.raises(ValueError):  # nothing raises: no exception of the usual kind
                pass
        assert n != 3

    with pytest.raises(BaseExceptionGroup, match="2 of 4 values fail") as caught:
        test()
    assert [error.__notes__ for error in caught.value.exceptions] == [["for n = n1"], ["for n = n3"]]


def test_one_failure_is_itself() -> None:
    @each(("n", "m"), [(1, 2), (1, 1)])
    def test(n: int, m: int) -> None:
        assert n != m

    with pytest.raises(AssertionError) as caught:
        test()
    assert caught.value.__notes__ == ["for n, m = 1, 1"]


@pytest.mark.parametrize("skips", [1, 2])
def test_a_test_of_which_all_values_are_skipped_is_skipped(skips: int) -> None:
    seen = []

    @each("n", range(2))
    def test(n: int) -> None:
        seen.append(n)
        if n < skips:
            pytest.skip("for want of a device")

    with pytest.raises(pytest.skip.Exception) if skips == 2 else contextlib.nullcontext():
        test()
    assert seen == [0, 1]


@pytest.mark.parametrize(("values", "ids"), [([], None), ([1], ["a", "b"])])
def test_no_values_and_ids_of_others_are_refused(values: list[int], ids: list[str] | None) -> None:
    with pytest.raises(ValueError, match="one for each value"):
        each("n", values, ids=ids)


@pytest.mark.parametrize("variable", ["", "EACH"])
def test_fixtures_and_marks_stay_and_values_can_be_items(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")

    @each("n", "abc")
    @pytest.mark.gpu
    def test(tmp_path: Path, n: str) -> None: ...

    marks = {mark.name: mark.args for mark in test.pytestmark}
    assert list(inspect.signature(test).parameters) == (["tmp_path", "n"] if variable else ["tmp_path"])
    assert marks == ({"gpu": (), "parametrize": ("n", ["a", "b", "c"])} if variable else {"gpu": ()})
