"""Workers on a Ray cluster, which run units as its tasks. Needs the extra `stopgrad[ray]`.

Every node needs this package, and the folder in which the command runs at the same path. Records come back over Ray's
object store. Ray runs a task again whose process or node was killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.runner._units import Answer, Message, Unit
from toolkit.runner._workers import Task, Workers

__all__ = ["on_ray"]


@contextlib.contextmanager
def on_ray(address: str, tries: int) -> Iterator[Workers]:
    """Yield the processors of a cluster. An error, or Ctrl-C, ends the tasks.

    Args:
        address: The cluster's address, as for `ray.init`: ``"auto"`` is a running cluster that this machine belongs to,
            ``"local"`` a new one of this machine alone.
        tries: The number of times that a unit is started if its process is killed.

    Raises:
        ConnectionError: If no cluster is there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # reports nothing to Ray's makers
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")
    try:
        yield _Cluster(tries)
    finally:
        ray.shutdown()


class _Cluster:
    def __init__(self, tries: int) -> None:
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._messages = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._run = ray.remote(max_retries=tries - 1)(_run)
        self._resources = ray.cluster_resources

    @property
    def count(self) -> int:
        """Twice the number of processors, which changes with the nodes."""
        return max(1, 2 * int(self._resources().get("CPU", 0)))

    def submit(self, task: Task, unit: Unit) -> Future[Answer]:
        config, future = unit.config.config, Future[Answer]()
        run = self._run.options(num_cpus=config.threads, num_gpus=int(config.device != "cpu"))
        run.remote(task, unit, Path.cwd(), self._messages).future().add_done_callback(partial(_end, unit, future))
        return future

    def messages(self) -> Iterator[Message]:
        yield from self._messages.get_nowait_batch(self._messages.qsize())


def _end(unit: Unit, future: Future[Answer], done: Future[Answer]) -> None:
    try:
        future.set_result(done.result())
    except Exception as error:  # Ray's own, after all tries
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        future.set_result(Answer(error=f"{unit.path}: seed {unit.seed}: {reason}"))


def _run(task: Task, unit: Unit, folder: Path, messages: Any) -> Answer:
    """Run a unit on a node, in the folder of the command."""

    def tell(message: Message) -> None:
        with contextlib.suppress(Exception):  # a progress bar is no reason to fail
            messages.put(message)

    with contextlib.chdir(folder):
        return task(unit, tell)
