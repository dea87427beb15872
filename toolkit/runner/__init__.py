"""Experiments: each trains one algorithm with its blocks in place and with them open, and records the difference.

An experiment is a module with a `Config`, a subclass of `ExperimentConfig`, and a function ``run(config, seed)`` that
returns a `Run`. A config file names the experiment and sets its values; ``stopgrad run`` trains it, and ``stopgrad
report`` draws the records.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.runner._config import ExperimentConfig
    from toolkit.runner._experiment import Event, Methods, Objective, Run, Sweep

__all__ = ["Event", "ExperimentConfig", "Methods", "Objective", "Run", "Sweep"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the report is drawn where pydantic is not installed."""
    if name in __all__:
        module = "_config" if name == "ExperimentConfig" else "_experiment"
        return getattr(importlib.import_module(f"toolkit.runner.{module}"), name)
    raise AttributeError(f"module 'toolkit.runner' has no attribute {name!r}")
