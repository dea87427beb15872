"""A small experiment, as a user puts one beside a config, and the real ones made short."""

import re
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

MODULE = '''
"""A toy: a straight line learns from its own predictions.

Second paragraph.
"""
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from toolkit.runner import Event, ExperimentConfig, Methods, Objective, Run, Sweep
from toolkit import block, is_blocked, stop_gradient

TARGET = block("{name}.target", "The target is a label: only the prediction moves.")
SHIFT = block("{name}.shift", "A shift that cancels.")


class Part(BaseModel):
    """A table of its own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    size: Annotated[int, Field(ge=1)]


class Config(ExperimentConfig):
    """Settings of the toy."""

    parts: list[Part] = []

    noise: Annotated[float, Field(ge=0)] = 0.1
    kind: str = "fair"
    sign: str = ""


def run(config, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(20, 3, generator=generator, dtype=torch.float64)

    def loss():
        if config.kind == "fails" and seed == 0:
            raise ArithmeticError("no toy\\nis whole")
        if config.sign and seed == 1 and not Path(config.sign).exists():
            Path(config.sign).touch()
            if config.kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:  # the first run that comes here stays, until it is killed
                time.sleep(60)
        if config.kind == "misfits":
            return torch.einsum("ij,j", inputs, weight[:2])  # the place of this error
        outputs = inputs @ weight
        noise = config.noise * torch.randn(20, generator=generator, dtype=torch.float64)
        target = outputs.tanh() + noise
        if config.kind == "diverges":  # a slope without bound that only an open block lets through
            target = target + 0 * (outputs - outputs).abs().sqrt()
        target = stop_gradient(target, TARGET)
        shift = stop_gradient(outputs.mean(), SHIFT)
        value = ((outputs - target) ** 2).mean() + (outputs - shift).mean() + shift
        if config.kind in ("unfair", "rounds") and not is_blocked(TARGET):
            value = value + {{"unfair": 1e-9, "rounds": 1e-15}}[config.kind]
        return value

    return Run(
        parameters={{"weight": weight}},
        loss=loss,
        objective=Objective(label="squared length (toy units)", higher_is_better=False, best=0.0),
        evaluate=lambda: {{"objective": weight.square().sum().item(), "first weight": weight[0].item()}},
        optimizer=torch.optim.SGD([weight], lr=config.learning_rate),
        events=[
            Event(says="it went <b>low</b>", metric="first weight", below=0.1),
            Event(says="a tail was heavy", metric="tail", above=2.0),
        ] if config.kind == "swept" else [],
        sweep=Sweep(
            label="cut (toy units)",
            values=(0.0, 1.0, 4.0),
            evaluate=lambda: {{
                "tail": [weight.abs().max().item() + cut for cut in (0.0, 1.0, 4.0)],
                "gap": [float("nan"), weight[1].item(), 0.0],
            }},
            times={{"lap (s)": lambda: [1.0, 2.0, loss().item() and 4.0 + is_blocked(TARGET)]}}
            if config.kind == "timed" else {{}},
        ) if config.kind in ("swept", "timed") else None,
        methods=Methods(
            label="lap",
            steps=(0, 5, 10),
            train={{
                "walk <b>on</b>": lambda: {{
                    "objective": [3.0, 1.0 + seed, 2.0], "first weight": [0.5, 0.25, seed / 8]
                }},
                "jump": lambda: {{"objective": [0.5], "first weight": [float("nan")]}},
                **({{"stumble": lambda: {{"objective": [1.0, 2.0]}}}} if config.kind == "stumbles" else {{}}),
            }},
            times={{"walk <b>on</b>": lambda: 0.25}} if config.kind == "timed" else {{}},
        ) if config.kind in ("methods", "stumbles", "timed") else None,
    )
'''

CONFIG = """
experiment = "{name}"
title = "A toy <b>&amp;</b>"
finding = "Nothing is known about toys."
open = ["{name}.target", "{name}.shift", ["{name}.target", "{name}.shift"]]
seeds = 2
steps = 6
evaluate_every = 2
learning_rate = 0.1
"""


def install(name: str, folder: Path) -> Path:
    """Write experiment and config under a name that no other test uses, and return the config's path."""
    experiments = folder / "experiments"
    experiments.mkdir(parents=True, exist_ok=True)
    (experiments / f"{name}.py").write_text(MODULE.format(name=name))
    path = folder / f"{name}.toml"
    path.write_text(textwrap.dedent(CONFIG.format(name=name)).lstrip())
    return path


def rewrite(source: Path, path: Path, values: Iterable[str]) -> Path:
    """Write a copy of a config with other values in the file itself, ``key=value`` each."""
    lines = source.read_text().splitlines()
    for value in values:
        key, _, text = value.partition("=")
        value = value if _is_toml(value) else f"{key} = {text!r}"
        start = next((number for number, line in enumerate(lines) if re.match(rf"{key} *=", line)), None)
        if start is None:
            lines.insert(1, value)
            continue
        end = start + 1
        while not _is_toml("\n".join(lines[start:end])):
            end += 1
        lines[start:end] = [value]
    path.write_text("\n".join(lines) + "\n")
    return path


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


# Settings with a length of their own, however few the steps are: as they begin in a config -> the override.
LENGTHS = {
    "estimators = ": "estimators=[]",
    "clean_steps = ": "clean_steps=1",
    "worst_steps = ": "worst_steps=2",
    "swept_steps = ": "swept_steps=[1, 4]",
    "attack_steps = [": "attack_steps=[1, 3]",
}


def two_steps(path: Path) -> list[str]:
    """Return the overrides that make a config as short as its record allows."""
    text = f"\n{path.read_text()}"
    own = [override for beginning, override in LENGTHS.items() if f"\n{beginning}" in text]
    return ["steps=2", "seeds=1", "evaluate_every=1", *own]
