"""Other machines, imitated on this one: `make test-portable` runs the numerical tests on each of them.

Instruction sets, the code paths of matrix libraries, numbers of threads and the order of the terms of a sum decide how
results are rounded, and nothing else.

    python tests/machines.py [MACHINE ...] [-- ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from folders import ROOT, TESTS

# Files in which nothing is added up, and those whose programs are compiled for the processor that is really there.
_OTHERS = {
    *("audit_command", "audit_packages", "audit_scripts", "blocks_compiled", "commands", "config", "contributing"),
    *("layout", "mutants", "packaging", "peers", "portability", "public_names", "records", "report"),
}


@dataclass(frozen=True)
class Machine:
    """An imitation: variables that libraries read when they are loaded, and options of the tests."""

    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    capability: str = ""  # what torch says of such a processor

    @property
    def exists(self) -> bool:
        """Whether this processor can imitate it."""
        needed = {"AVX2": torch.cpu._is_avx2_supported, "AVX512": torch.cpu._is_avx512_supported}
        return torch.backends.mkl.is_available() and needed.get(self.capability, lambda: True)()

    def pytest(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the tests on it, which write to a file."""
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *self.options, *arguments],
                cwd=ROOT,
                # Torch keeps compiled graphs by a key in which the processor that is imitated does not stand.
                env={
                    **os.environ,
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "TORCHINDUCTOR_CACHE_DIR": str(log.with_suffix(".compiled")),
                    **self.environment,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def _processor(aten: str, mkl: str, onednn: str, openblas: str, **more: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_CBWR": mkl,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "OPENBLAS_CORETYPE": openblas,
        **more,
    }


_OLD = _processor("default", "COMPATIBLE", "SSE41", "Nehalem")
_AVX2 = _processor("avx2", "AVX2", "AVX2", "Haswell")
_TWO, _REVERSED = ("--torch-threads", "2"), ("--reversed-sums",)

MACHINES = {
    "no-vectors": Machine(_OLD, (), "DEFAULT"),
    "avx2": Machine(_AVX2, (), "AVX2"),
    "avx2-two-threads": Machine({"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, _TWO, "AVX2"),
    "avx512": Machine(_processor("avx512", "AVX512", "AVX512_CORE", "SkylakeX"), (), "AVX512"),
    "two-threads": Machine({}, _TWO),
    "reversed-sums": Machine({}, _REVERSED),
    "no-vectors-reversed-sums": Machine(_OLD, _REVERSED, "DEFAULT"),
}

# The two that differ most from any machine of today, and from each other: what `make test-all` tries the riskiest on.
RISKIEST = ("no-vectors-reversed-sums", "avx2-two-threads")


def numerical() -> list[str]:
    """Return the files of tests that add up numbers, and where the examples are."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if path.stem.removeprefix("test_") not in _OTHERS]
    return [*(str(path.relative_to(ROOT)) for path in files), "toolkit", "README.md", "docs"]


def marked() -> list[str]:
    """Return the files that have tests which are a rounding error away from another answer."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "@pytest.mark.portable" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in files]


def _run(name: str, log: Path, arguments: list[str]) -> tuple[str, int, float, Path]:
    print(f"{name}: started, and writes to {log}", flush=True)
    started = time.perf_counter()
    code = MACHINES[name].pytest(log, *(arguments or numerical())).wait()
    return name, code, time.perf_counter() - started, log


def main(arguments: list[str]) -> int:
    """Run the tests on the machines named, or on all, as many at a time as there are cores; return how many failed."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, rest = arguments[:at] or list(MACHINES), arguments[at + 1 :]
    unknown = set(names) - set(MACHINES)
    if unknown:
        sys.exit(f"A machine should be one of {', '.join(MACHINES)}. Found {', '.join(sorted(unknown))}.")
    failures = 0
    for name in [name for name in names if not MACHINES[name].exists]:
        print(f"{name}: left out, this processor cannot imitate it", flush=True)
        names.remove(name)
    logs = Path(tempfile.mkdtemp(prefix="machines-"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, code, seconds, log in pool.map(lambda name: _run(name, logs / f"{name}.log", rest), names):
            failures += code != 0
            lines = log.read_text(errors="replace").splitlines()
            summary = [line for line in lines if line.startswith(("FAILED", "ERROR", "Fatal"))] if code else []
            print(f"{name}: {lines[-1].strip('= ')} ({seconds / 60:.0f} min)", *summary, sep="\n", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
