"""The page of all blocks: a row for each, with the numbers of the programs that the tests prove."""

import re
import sys

import pytest
from folders import ROOT

from toolkit import declared_blocks

sys.path.append(str(ROOT / "docs"))
import block_atlas


def _cells(name):
    (cases,) = (cases for cases in block_atlas.cases_of_blocks() if cases[0].block.name == name)
    return dict(zip(block_atlas.COLUMNS, block_atlas.row(cases, ["some"]), strict=True))


def test_every_block_of_the_toolkit_and_of_the_experiments_has_a_row():
    rows = {cases[0].block.name for cases in block_atlas.cases_of_blocks()}
    families = {
        path.stem for room in ("toolkit", "experiments") for path in (ROOT / room).iterdir() if path.stem[0] != "_"
    }
    known = {name for name, block in declared_blocks().items() if block.why and name.split(".")[0] in families}
    assert known <= rows


def test_the_shift_of_a_softmax_does_nothing():
    cells = _cells("softmax.shift")
    assert cells["verdict"][0] == "redundant"
    assert float(cells["leak"][1]) < 1e-12
    assert float(cells["asymmetry"][1]) < 1e-12
    assert cells["opened by"] == ('<a href="all_experiments.html#config-some"><code>some</code></a>', "1")


def test_one_of_two_shifts_moves_the_gradient():
    """At the point (1, 2, 2), p = (.155, .422, .422): the maximum is shared, so opening one shift takes (0, .5, .5)."""
    cells = _cells("softmax.inner_shift")
    assert cells["verdict"][0] == "partial"
    assert float(cells["leak"][1]) > 0.1


def test_a_program_that_can_be_differentiated_twice_tells_of_the_field():
    """The program of this block with the largest leak switches the recording on inside of its region."""
    assert float(_cells("bilevel.solution")["asymmetry"][1]) < 1e-12


@pytest.mark.slow
def test_a_block_keeps_less_than_an_open_one():
    told, key = _cells("em.responsibilities")["bytes kept"]
    closed, opened = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+\d", told))
    assert closed < opened
    assert float(key) == opened / closed


def test_the_table_names_the_configs_that_open_a_block():
    configs = block_atlas._configs()
    assert "softmax_half_blocked" in configs["softmax.inner_shift"]
    assert configs["em.responsibilities"] == sorted(configs["em.responsibilities"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["em.responsibilities", "rbm.negative_samples"])
def test_every_cell_has_a_text_or_a_key(name):
    assert all(isinstance(text, str) and isinstance(key, str) for text, key in _cells(name).values())
