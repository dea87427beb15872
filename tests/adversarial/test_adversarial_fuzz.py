"""Random models, balls and attacks: nothing is left behind, no bound is passed, and what is reported is true."""

import model_fuzzing
import pytest
from each import each


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of checkpoints
@each("seed", range(1, 4))
def test_random_models_are_attacked_as_promised(seed):
    assert not model_fuzzing.check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@each("seed", range(4, 60))
def test_more_random_models_are_attacked_as_promised(seed):
    assert not model_fuzzing.check(seed)
