"""Processes that start warm: copies of one that has imported torch, which takes a start of Python 1.5 to 3 seconds.

`python()` returns a command to use in place of `sys.executable`. Its process has the arguments, folder, environment and
files of any other, ends as any other, and dies with it. Three things differ: the libraries in `_LIBRARIES` are there
already and are not destroyed at the end, of their objects `gc` knows those of torch alone, and all copies hash strings
alike. Tests of imports, hashes and memory start `sys.executable`. An environment that a library could read while it is
imported starts Python itself, as do options other than -B, -c, -m and -u.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import itertools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_LIBRARIES = ("torch", "torch._dynamo", "scipy.special", "sklearn.datasets", "pydantic", "multiprocessing.spawn")
_READ_ON_IMPORT = (
    *("ATEN_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "TORCH_LOGS", "TORCH_SHOW_"),
)
_TAKEN_OVER = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")
_SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")  # when imported
_MOST_FILES = 250  # that one message can hand over

# Needs nothing but the standard library, and 20 ms. Signals and the end of this process are the copy's too.
_CLIENT = """\
#!{python} -SE
import json, os, signal, socket, sys
python, address = {python!r}, {address!r}
found = {{name: value for name, value in os.environ.items() if name.startswith({read!r}) and name not in {taken!r}}}
options, words = [], sys.argv[1:]
while words and words[0] in ("-B", "-u"):
    options.append(words.pop(0))
if found != {environment!r} or not words or words[0][0] == "-" and words[0] not in ("-c", "-m"):
    os.execv(python, [python, *sys.argv[1:]])
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
        files.append(int(name))
    except OSError:
        pass  # the folder itself, closed by now
server = socket.socket(socket.AF_UNIX)
server.connect(address)
ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
request = json.dumps([words, options, os.getcwd(), dict(os.environ), ignores, files]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM):  # the copy ignores what was ignored here, until its program changes that
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
status = int(server.recv(16) or b"1")
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def is_possible() -> bool:
    """Return whether the system has what a process that starts warm needs."""
    return hasattr(os, "pidfd_open") and Path("/proc/self/fd").is_dir()


@functools.cache
def python(executable: str = sys.executable) -> str:
    """Return the command that starts an interpreter warm, or the interpreter itself where the system cannot."""
    if not is_possible():
        return executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    environment = {name: value for name, value in os.environ.items() if name not in _TAKEN_OVER}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        command = [executable, __file__, str(listener.fileno()), str(folder / "python")]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[listener.fileno()])
    client = _CLIENT.format(
        python=executable,
        address=str(folder / "socket"),
        environment={
            name: value
            for name, value in environment.items()
            if name.startswith(_READ_ON_IMPORT) and name not in _SET_BY_LIBRARIES
        },
        read=_READ_ON_IMPORT,
        taken=(*_TAKEN_OVER, *_SET_BY_LIBRARIES),
    )
    (folder / "python").write_text(client, encoding="utf-8")
    (folder / "python").chmod(0o700)
    atexit.register(_end, server, folder)
    return str(folder / "python")


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process that writes into a pipe, and wait for its copy, which dies a moment later and closes the pipe."""
    process.kill()
    process.communicate()


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.kill()  # it may still import
    server.communicate()
    shutil.rmtree(folder)


def _serve(listener: socket.socket) -> socket.socket:
    """Wait for clients until the input ends; return in a copy, with the client that it is for."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return client
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _received(client: socket.socket) -> tuple[list[str], list[str], str, dict[str, str], bool, dict[int, int]]:
    """Return arguments, options of Python, folder, environment, whether SIGINT is ignored, and files.

    Of the files: their number there -> here.
    """
    size, files, _, _ = socket.recv_fds(client, 8, _MOST_FILES)
    text = bytearray()
    while len(text) < int.from_bytes(size, "big"):
        text += client.recv(1 << 16)
    *request, numbers = json.loads(text)
    return *request, dict(zip(numbers, files, strict=True))


def _attend(client: socket.socket, child: int) -> None:
    """Hand signals on to the copy, and its end back to the client."""
    ended = os.pidfd_open(child)
    while ended not in select.select([client, ended], [], [])[0]:
        os.kill(child, (client.recv(1) or bytes([signal.SIGKILL]))[0])
    with contextlib.suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


def _stream(number: int, *, at_once: bool) -> io.TextIOWrapper:
    """Return a standard file as Python opens it."""
    if number == 0:
        return open(0, encoding="utf-8", closefd=False)
    raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    by_lines, errors = number == 2 or raw.isatty(), "strict" if number == 1 else "backslashreplace"
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=by_lines, write_through=at_once)


def _take(files: dict[int, int], environment: dict[str, str], folder: str, options: list[str]) -> None:
    above = max(files, default=0) + 1
    kept = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in files.items()}
    for file in {0, 1, 2, *files.values()}:
        os.close(file)
    for number, file in kept.items():
        os.dup2(file, number)
        os.close(file)
    at_once = "-u" in options or bool(environment.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, at_once=at_once) if number in kept else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = "-B" in options or bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    os.chdir(folder)


def _run(arguments: list[str]) -> None:
    """Run a program as Python does when it starts."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = ["-m", *rest]
            sys.path.insert(0, str(Path.cwd()))
            runpy._run_module_as_main(module)
        case ["-c", text, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(text, "<string>", "exec"), main.__dict__)
        case [file, *_]:
            sys.argv = arguments
            sys.path.insert(0, str(Path(file).resolve().parent))
            main.__file__ = str(Path.cwd() / file)
            exec(compile(Path(file).read_bytes(), main.__file__, "exec"), main.__dict__)


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace


def objects_of_torch() -> list[Any]:
    """Return the objects that an audit looks for, of all that are there."""
    import torch

    kinds = (torch.Tensor, torch.nn.Module, torch.jit.ScriptFunction, torch.amp.GradScaler, torch.optim.Optimizer)
    objects = gc.get_objects()  # millions: each kind is looked at once, and no line of Python runs for each object
    of_torch = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return list(itertools.compress(objects, map(of_torch.__contains__, map(type, objects))))


def _freeze() -> None:
    """Keep the garbage collector from the libraries: to collect, list or count their objects takes most of an audit.

    A program that freezes objects itself finds the functions of `gc` as they are.
    """
    gc.collect()
    hidden, plain = objects_of_torch(), dict(vars(gc))
    gc.freeze()

    def given_back(name: str) -> Callable[[], None]:
        def call() -> None:
            vars(gc).update(plain)
            plain[name]()

        return call

    gc.freeze, gc.unfreeze = given_back("freeze"), given_back("unfreeze")
    gc.get_freeze_count = lambda: 0
    gc.get_objects = lambda generation=None: [*hidden, *plain["get_objects"](generation)]


def _status(code: object) -> int:
    """Return the status of a program that raised SystemExit, and print its code where Python prints it."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _leave(ended: list[int], libraries: Collection[str]) -> None:
    """Destroy the objects of a program that has ended, as Python does, and leave those of libraries to the system.

    To destroy them takes longer than most programs run. Python itself ends a program with threads left, or whose output
    nobody reads.
    """
    if not ended or threading.active_count() > 1:
        return
    with contextlib.suppress(Exception):
        _flush()
        for module in [sys.modules["__main__"], *(m for name, m in list(sys.modules.items()) if name not in libraries)]:
            names = getattr(module, "__dict__", {})
            for name in [name for name in names if name != "__builtins__"]:
                names[name] = None
        gc.collect()
        _flush()
        os._exit(ended[0])


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


def _main(listener: socket.socket, executable: str) -> None:
    ended, libraries = list[int](), set[str]()
    atexit.register(_leave, ended, libraries)  # called last
    for name in _LIBRARIES:
        importlib.import_module(name)
    libraries.update(sys.modules)
    del sys.path[0]  # of this file
    _freeze()
    client = _serve(listener)
    arguments, options, folder, environment, ignores, files = _received(client)
    if child := os.fork():
        for file in files.values():
            os.close(file)
        _attend(client, child)
    client.close()
    # A shell lets its background jobs ignore it; the server's own setting is that of the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
    _take(files, environment, folder, options)
    modules: dict[str, Any] = sys.modules
    modules["numpy"].random.seed()  # from the system, as at a start
    modules["multiprocessing"].set_executable(executable)
    modules["multiprocessing.process"].ORIGINAL_DIR = folder
    sys.executable, sys.orig_argv = executable, [executable, *arguments]
    try:
        _run(arguments)
        ended.append(0)
    except SystemExit as end:
        ended.append(_status(end.code))
    except Exception as error:
        sys.excepthook(type(error), error.with_traceback(_without_us(error.__traceback__)), None)
        ended.append(1)
    sys.exit(ended[0])


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
