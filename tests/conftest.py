"""Settings that every test shares."""

import os

# Small models on two OpenMP threads that spin-wait run up to ten times slower than on one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
