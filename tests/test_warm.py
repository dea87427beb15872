"""A process that starts warm is a process like any other, with torch in it already."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.skipif(not warm.is_possible(), reason="here processes start cold")

WHAT_A_PROGRAM_SEES = (
    "import json, os, signal, sys; print(json.dumps([__name__, sys.argv, sys.path, os.getcwd(), sys.flags.optimize, "
    "dict(os.environ), sys.stdin.read(), sys.stdout.line_buffering, sorted(os.listdir('/proc/self/fd'))[:3], "
    "str(signal.getsignal(signal.SIGINT)), sys.dont_write_bytecode, sys.stdout.write_through])); "
    "print('said', file=sys.stderr)"
)
IS_WARM = "import sys; print('torch' in sys.modules, 'toolkit' in sys.modules)"


def _run(python, *arguments, **options):
    return subprocess.run([python, *arguments], capture_output=True, text=True, **options)


def _both(*arguments, **options):
    """Return the status and the words of a program that starts warm, after a comparison with a plain start."""
    found, expected = (_run(python, *arguments, **options) for python in (warm.python(), sys.executable))
    for done in (found, expected):  # Triton, which comes with builds for CUDA, lists addresses at the end of a process
        done.stderr = re.sub(r"(nanobind: | - |See https://nanobind).*\n?", "", done.stderr)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)
    return found


OBJECTS = """
import gc, torch
held = torch.nn.Linear(1, 1), [torch.zeros(1)]
found = [gc.get_freeze_count(), sum(kept is held[0] for kept in gc.get_objects())]
if {freezes}:
    gc.freeze()
    found += [gc.get_freeze_count() > 0, sum(kept is held[0] for kept in gc.get_objects())]
    gc.unfreeze()
    found += [gc.get_freeze_count(), sum(kept is held[0] for kept in gc.get_objects())]
    found += [any(kept is torch.__dict__ for kept in gc.get_objects())]
print(found)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "inner.py").write_text(WHAT_A_PROGRAM_SEES + "\nprint(__spec__.name)\n")
    (tmp_path / "program.py").write_text(WHAT_A_PROGRAM_SEES + "\nprint(__file__)\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", WHAT_A_PROGRAM_SEES, "--a", "b"],
        ["-m", "package.inner", "-c"],
        ["package/../program.py", "-m"],
        ["-u", "program.py"],
        ["-B", "-u", "program.py"],
    ],
    ids=["code", "module", "file", "at once", "without bytecode"],
)
def test_a_program_sees_what_it_sees_after_a_plain_start(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["/a", "/b"]), "OWN": "é\n'"}
    assert _both(*arguments, cwd=folder, env=environment, input="asked\n").returncode == 0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a reason')",
        "def f(x):\n    return 1 / x\nf(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os._exit(3)",
        "import atexit; atexit.register(print, 'last'); raise SystemExit",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "def f(:",
    ],
)
def test_it_ends_as_after_a_plain_start(program):
    _both("-c", program)


def test_a_module_that_is_not_there():
    assert "No module named nowhere" in _run(warm.python(), "-m", "nowhere").stderr


def test_libraries_are_there_and_the_toolkit_is_not():
    assert _run(warm.python(), "-c", IS_WARM).stdout == "True False\n"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "MKL_CBWR", "TORCH_LOGS"])
def test_another_environment_of_libraries_starts_python_itself(name):
    assert _run(warm.python(), "-c", IS_WARM, env={**os.environ, name: "7"}).stdout == "False False\n"


def test_variables_that_libraries_set_do_not_matter():
    environment = {**os.environ, "KMP_DUPLICATE_LIB_OK": "True", "TORCHINDUCTOR_CACHE_DIR": "/tmp"}
    assert _run(warm.python(), "-c", IS_WARM, env=environment).stdout == "True False\n"


@pytest.mark.parametrize("option", ["-B", "-u"])
def test_options_of_processes_that_tests_start_are_known(option):
    assert _run(warm.python(), option, "-c", IS_WARM).stdout == "True False\n"


def test_other_options_of_python_start_python_itself():
    assert _run(warm.python(), "-W", "error", "-c", IS_WARM).stdout == "False False\n"


def test_its_own_python_is_warm_too():
    program = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {IS_WARM!r}])"
    assert _run(warm.python(), "-c", program).stdout == "True False\n"


def test_processes_that_it_spawns_are_warm_too(tmp_path):
    (tmp_path / "program.py").write_text(
        "import multiprocessing, sys\n"
        "def is_warm(x):\n"
        "    return x, 'torch' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(is_warm, [4]))\n"
    )
    done = _run(warm.python(), "program.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[(4, True)]\n"), done.stderr


@pytest.mark.parametrize(("setting", "expected"), [(signal.SIG_IGN, "True"), (signal.SIG_DFL, "False")])
def test_it_ignores_the_interrupt_as_a_new_process_does(setting, expected):
    program = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    for python in (warm.python(), sys.executable):
        set_before = functools.partial(signal.signal, signal.SIGINT, setting)
        assert subprocess.check_output([python, "-c", program], text=True, preexec_fn=set_before).strip() == expected


def test_a_program_that_heeds_the_interrupt_again_gets_it():
    program = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('interrupted')"
    )
    ignored = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    command = [warm.python(), "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignored) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.communicate(timeout=60)[0] == "interrupted\n"
        finally:
            process.kill()
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_the_copy(number):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [warm.python(), "-c", program]
    heeded = functools.partial(signal.signal, number, signal.SIG_DFL)  # a shell lets its background jobs ignore SIGINT
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=None if number == signal.SIGKILL else heeded,
    )
    with started as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.stdout.read() == ""  # comes when the copy has closed it
    assert process.returncode == -number
    while Path(f"/proc/{pid}").exists():  # until its parent has noticed
        time.sleep(0.01)


@pytest.mark.parametrize("freezes", [False, True], ids=["plain", "frozen"])
def test_a_program_finds_its_own_objects(freezes):
    assert _both("-c", OBJECTS.format(freezes=freezes)).returncode == 0


def test_objects_of_libraries_are_left_out_except_for_those_of_torch():
    program = (
        "import gc, torch; found = gc.get_objects(); print(len(found), sum(isinstance(a, torch.Tensor) for a in found))"
    )
    (n_warm, torchs_warm), (n_cold, torchs_cold) = (
        map(int, _run(python, "-c", program).stdout.split()) for python in (warm.python(), sys.executable)
    )
    assert n_warm < n_cold / 10
    assert torchs_warm >= torchs_cold


ENDS = {
    "a file that is left open": "file = open('left.txt', 'w'); file.write('kept')",
    "an object of the program": "class Last:\n    def __del__(self): print('gone')\nlast = Last()",
    "an object in a cycle": "class Last:\n    def __del__(self): print('gone')\nlast = Last(); last.own = last",
    "a function that is called at the end": "import atexit; atexit.register(print, 'end'); raise ValueError",
    "a thread that goes on": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()",
    "a thread that does not hold the end up": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "a child": "import os\nif not os.fork():\n    raise SystemExit(5)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "a large status": "import sys; sys.exit(300)",
    "a negative status": "import sys; sys.exit(-1)",
    "a truth value": "import sys; sys.exit(True)",
    "words": "import sys; print('said', end=''); sys.exit(('a', 1))",
    "output that is replaced": "import io, sys; sys.stdout = io.StringIO(); print('nobody')",
    "output that is closed": "import sys; print('said'); sys.stdout.close()",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_a_program_ends_as_after_a_plain_start(program, tmp_path):
    _both("-c", program, cwd=tmp_path)
    if "left.txt" in program:
        assert (tmp_path / "left.txt").read_text() == "kept"
