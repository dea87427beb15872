"""What an import costs: no room of the toolkit loads Dynamo, which takes longer than all of the rest."""

import pkgutil
import subprocess
import sys
import textwrap

import toolkit

# `toolkit` gives out its names when they are asked for; its command line loads torch when it has something to run.
ROOMS = ["toolkit", *sorted(f"toolkit.{room.name}" for room in pkgutil.iter_modules(toolkit.__path__))]


def _who_loads(module: str, imports: list[str]) -> list[str]:
    """Import in a fresh process, one after the other, and return those that another module is loaded by."""
    program = textwrap.dedent(f"""
        import importlib, os, sys
        from toolkit import stop_gradient
        loads = ["stop_gradient"] * ({module!r} in sys.modules)
        for name in {imports!r}:
            importlib.import_module(name)
            if {module!r} in sys.modules and not loads:
                loads.append(name)
        print(*loads, flush=True)
        os._exit(0)  # to destroy the modules takes a second
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_dynamo_loads_itself_after_all_rooms() -> None:
    """And is noticed: what loads it first is named."""
    assert {"toolkit.em", "toolkit.rbm", "toolkit.softmax", "toolkit.adversarial", "toolkit.gradients"} <= {*ROOMS}
    assert _who_loads("torch._dynamo", [*ROOMS, "torch._dynamo", "json"]) == ["torch._dynamo"]
