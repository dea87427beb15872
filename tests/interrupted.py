"""Training that is stopped by its callback, killed in a process of its own, or shared by several ranks."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import warm
from folders import ROOT, TESTS


class Stop(Exception):
    """Leaves training from its callback."""


def stopping_at(update: int) -> Callable[[int, int], None]:
    """Return a callback that stops training after this update."""

    def callback(done: int, epoch: int) -> None:
        if done == update:
            raise Stop

    return callback


def start_process(test: str, code: str, *arguments: object, **pipes: int) -> subprocess.Popen[str]:
    """Start a process of one thread, which can import the file of tests `test` and the helpers of all tests."""
    paths = [str(path) for path in (Path(test).parent, TESTS, ROOT)]
    lines = f"import sys, torch\nsys.path[:0] = {paths!r}\ntorch.set_num_threads(1)\n"
    command = [warm.python(), "-c", lines + code, *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **pipes)


_RANK = """
from pathlib import Path
from interrupted import answer_as_rank
from {module} import as_rank
answer_as_rank(as_rank, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
"""


def answers_of_ranks(test: str, world: int, folder: Path) -> list[dict]:
    """Return the answers of `as_rank(rank, world, folder)` of the file of tests `test`, each from a process."""
    code = _RANK.format(module=Path(test).stem)
    processes = [start_process(test, code, rank, world, folder, stderr=subprocess.PIPE) for rank in range(world)]
    said = [process.communicate()[1] for process in processes]  # pytest limits its time
    assert all(process.returncode == 0 for process in processes), "".join(said)[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def answer_as_rank(as_rank: Callable[[int, int, Path], dict], rank: int, world: int, folder: Path) -> None:
    """Join the group of all ranks, write the answer of this one, and end the process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(as_rank(rank, world, folder), folder / f"{rank}.pt")
    # Not `destroy_process_group`: taking down gloo's threads aborts now and then. When all have written, all is done.
    while sum(1 for _ in folder.glob("*.pt")) < world:
        time.sleep(0.01)
    os._exit(0)
