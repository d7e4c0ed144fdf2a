"""launch/local.py: processes with their variables, output by process, failures, signals, restarts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(*options: str, code: str) -> list[str]:
    return [sys.executable, "launch/local.py", *options, "--", sys.executable, "-c", code]


def launch(*options: str, code: str, **variables: str) -> subprocess.CompletedProcess:
    env = os.environ | variables
    return subprocess.run(command(*options, code=code), cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_each_process_has_its_variables_and_its_prefix():
    names = "JAX_PLATFORMS XLA_FLAGS MARSJAX_COORDINATOR MARSJAX_PROCESSES MARSJAX_PROCESS_ID"
    code = f"import os; print([os.environ[n] for n in '{names}'.split()])"
    flags = "--xla_cpu_a=1 --xla_force_host_platform_device_count=9"
    run = launch("--processes", "3", "--devices", "2", "--port", "4567", code=code, XLA_FLAGS=flags)
    assert run.returncode == 0
    said = "['cpu', '--xla_cpu_a=1 --xla_force_host_platform_device_count=2', '127.0.0.1:4567', '3', '{}']"
    assert sorted(run.stdout.splitlines()) == [f"[process {i}] {said.format(i)}" for i in range(3)]


FAILS = """
import os, signal, sys, time
if os.environ['MARSJAX_PROCESS_ID'] == '1':
    time.sleep(0.3)
    sys.exit(7)
if {deaf}:
    signal.signal(signal.SIGTERM, lambda *_: print('deaf', flush=True))
for _ in range(600):
    time.sleep(0.1)
"""


def test_one_that_fails_ends_the_others_with_its_exit_code():
    begun = time.monotonic()
    run = launch("--processes", "3", code=FAILS.format(deaf=False))
    assert run.returncode == 7
    assert "process 1 ended with exit code 7; ending the others" in run.stderr
    assert time.monotonic() - begun < 8


def test_one_that_ignores_sigterm_is_killed_after_the_grace():
    begun = time.monotonic()
    run = launch("--grace", "1", code=FAILS.format(deaf=True))
    assert run.returncode == 7
    assert "[process 0] deaf" in run.stdout
    assert 1 < time.monotonic() - begun < 15


def test_a_signal_is_told_and_counted_as_a_shell_does():
    run = launch(code="import os\nif os.environ['MARSJAX_PROCESS_ID'] == '0': os.kill(os.getpid(), 9)")
    assert run.returncode == 137
    assert "process 0 ended with SIGKILL" in run.stderr


def test_restart_starts_all_again_until_it_works_or_the_count_is_over(tmp_path):
    code = (
        "import os, sys, pathlib\nme = os.environ['MARSJAX_PROCESS_ID']\n"
        f"seen = pathlib.Path({str(tmp_path)!r}, me)\n"
        "count = int(seen.read_text()) + 1 if seen.exists() else 1\nseen.write_text(str(count))\n"
        "print('attempt', count)\nsys.exit(3 if me == '1' and count < 3 else 0)"
    )
    run = launch("--restart", "1", code=code)
    assert run.returncode == 3
    assert run.stderr.count("starting all again") == 1
    run = launch("--restart", "5", code=code)
    assert run.returncode == 0, run.stderr
    assert "[process 1] attempt 3" in run.stdout


SIGNALS = """
import os, signal, sys, time
def saved(number, frame):
    print('asked', flush=True)
    time.sleep(0.5 if os.environ['MARSJAX_PROCESS_ID'] == '1' else 0)
    print('saved', flush=True)
    sys.exit(5)
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, {handler})
print('ready', flush=True)
for _ in range(600):
    time.sleep(0.1)
"""


def signalled(*options: str, handler: str, signals: list[int]) -> tuple[int, list[str], str, float]:
    """Exit code, lines, what the launcher said and seconds from the first signal, one sent when all are ready.

    The next ones are sent when every process has answered a line to the one before.
    """
    run = subprocess.Popen(
        command(*options, code=SIGNALS.format(handler=handler)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        lines = [run.stdout.readline() for _ in range(2)]
        begun = time.monotonic()
        for place, number in enumerate(signals):
            if place:
                lines += [run.stdout.readline() for _ in range(2)]
            run.send_signal(number)
        rest, said = run.communicate(timeout=30)
    finally:
        run.kill()
    return run.returncode, sorted([*lines, *rest.splitlines(keepends=True)]), said, time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_on_to_all_once_and_ends_restarts(number):
    """Once: the process that takes longer to save is not interrupted when the other has ended."""
    code, lines, _, seconds = signalled("--restart", "9", handler="saved", signals=[number])
    assert code == 5
    assert lines == sorted(f"[process {i}] {word}\n" for i in range(2) for word in ("ready", "asked", "saved"))
    assert seconds < 10


DEAF = "lambda *_: print('deaf', flush=True)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_signal_does_not_end_is_killed_after_the_grace(number):
    code, lines, said, seconds = signalled("--restart", "9", "--grace", "1", handler=DEAF, signals=[number])
    assert code == 137
    assert lines == sorted(f"[process {i}] {word}\n" for i in range(2) for word in ("ready", "deaf"))
    assert "still running when the grace was over, so killed: process 0, 1" in said
    assert "starting all again" not in said
    assert 1 < seconds < 10


def test_a_second_signal_kills_at_once():
    signals = [signal.SIGINT, signal.SIGINT]
    code, lines, said, seconds = signalled("--restart", "9", "--grace", "60", handler=DEAF, signals=signals)
    assert code == 137
    assert lines == sorted(f"[process {i}] {word}\n" for i in range(2) for word in ("ready", "deaf"))
    assert "starting all again" not in said
    assert seconds < 10


def test_wrong_options_are_refused():
    run = subprocess.run(
        [sys.executable, "launch/local.py", "--processes", "2"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "put it behind --" in run.stderr
    run = launch("--processes", "0", code="")
    assert run.returncode == 2
    assert "--processes 0 must be at least 1" in run.stderr
    run = subprocess.run(
        [sys.executable, "launch/local.py", "--", "no-such-program"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "no such program: no-such-program" in run.stderr
