"""The estimators beside scikit-learn: its checks of an estimator, its tools around one, and its own Gaussian mixture."""

import pickle

import numpy as np
import pytest
import torch
from sklearn import datasets as bundled
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from toolkit.em.estimator import GaussianMixture

# --- scikit-learn's own checks -----------------------------------------------------------------------------------


def known_failures(estimator):
    """Two starts drawn at random differ, so that a sample of weight 2 and a sample given twice do too."""
    check = "check_sample_weight_equivalence_on_dense_data"
    return {check: "the start is drawn among the samples"} if estimator.n_components > 1 else {}


@parametrize_with_checks(
    [
        GaussianMixture(),
        GaussianMixture(2, n_init=2, max_iter=5, init_params="random", covariance_type="tied"),
        GaussianMixture(covariance_type="spherical", accelerate="none", warm_start=True),
    ],
    expected_failed_checks=known_failures,
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_estimator_checks(estimator, check):
    check(estimator)
