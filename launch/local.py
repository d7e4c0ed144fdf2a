#!/usr/bin/env python3
"""Starts the processes of a run on this machine, on CPU devices: what several hosts do, to try and to test.

    python launch/local.py --processes 2 --devices 4 -- marsjax train config.yaml output.directory=runs/two

Their output comes with [process i] before each line. The first that fails ends the others, and its exit code is
returned; SIGINT and SIGTERM go on to all. What still runs --grace seconds after either is killed, and at once at a
second signal. With --restart K all are started again up to K times after a failure, as on spot machines. Needs nothing
but Python.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

COUNT = "--xla_force_host_platform_device_count"


def environment(process_id: int, processes: int, devices: int, port: int) -> dict[str, str]:
    """The variables of one process: a CPU with `devices` devices, joined on loopback."""
    flags = re.sub(rf"{COUNT}=\d+", "", os.environ.get("XLA_FLAGS", "")).split()
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{COUNT}={devices}"]),
        "MARSJAX_COORDINATOR": f"127.0.0.1:{port}",
        "MARSJAX_PROCESSES": str(processes),
        "MARSJAX_PROCESS_ID": str(process_id),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _copy(source: IO[str], process_id: int, lock: threading.Lock) -> None:
    for line in source:
        with lock:
            sys.stdout.write(f"[process {process_id}] {line.rstrip()}\n")
            sys.stdout.flush()


class Group:
    """The processes of one attempt."""

    def __init__(self, command: Sequence[str], processes: int, devices: int, port: int) -> None:
        self.children: list[subprocess.Popen[str]] = []
        self._copies: list[threading.Thread] = []
        self._kill_at: float | None = None  # time.monotonic(), once they were asked to end
        self._killed = False
        lock = threading.Lock()
        for number in range(processes):
            child = subprocess.Popen(
                command,
                env=environment(number, processes, devices, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a terminal's Ctrl-C reaches them once, from here; and so do their children
            )
            self.children.append(child)
            assert child.stdout is not None
            copy = threading.Thread(target=_copy, args=(child.stdout, number, lock), daemon=True)
            copy.start()
            self._copies.append(copy)

    def send(self, number: int) -> None:
        """Sends a signal to every process that still runs, and to those that it started."""
        for child in self.children:
            if child.poll() is None:
                try:
                    os.killpg(child.pid, number)
                except ProcessLookupError:
                    continue

    def stop(self, number: int, grace: float) -> None:
        """Asks all to end with a signal; those that still run after `grace` seconds are killed while `wait` waits.

        Asked again it kills them at once: a process that hangs in compiled code sees no signal but SIGKILL.
        """
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace
            self.send(number)
        else:
            self.send(signal.SIGKILL)

    def wait(self, grace: float) -> int:
        """The exit code of the run: 0, or that of the first process that failed (128 + n for signal n)."""
        while True:
            codes = [child.poll() for child in self.children]
            failed = [(number, code) for number, code in enumerate(codes) if code]
            if failed or None not in codes:
                break
            self._kill_late()
            time.sleep(0.05)
        if failed:
            number, code = failed[0]
            reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            if None in codes:
                _say(f"process {number} ended with {reason}; ending the others")
                self.end(grace)
            else:
                _say(f"process {number} ended with {reason}")
        for copy in self._copies:  # a grandchild may hold the pipe open
            copy.join(timeout=2)
        if not failed:
            return 0
        return failed[0][1] if failed[0][1] > 0 else 128 - failed[0][1]

    def end(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to what still runs after `grace` seconds.

        Those that were asked to end already are not asked again, which would interrupt them while they save.
        """
        if self._kill_at is None:
            self.stop(signal.SIGTERM, grace)
        while any(child.poll() is None for child in self.children) and not self._kill_late():
            time.sleep(0.05)
        for child in self.children:
            child.wait()

    def kill(self) -> None:
        """SIGKILL to what still runs."""
        self.send(signal.SIGKILL)
        for child in self.children:
            child.wait()

    def _kill_late(self) -> bool:
        """Kills what still runs if it was asked to end and its time is over; whether it is."""
        if self._kill_at is None or time.monotonic() < self._kill_at:
            return False
        if not self._killed:
            self._killed = True
            late = [str(number) for number, child in enumerate(self.children) if child.poll() is None]
            _say(f"still running when the grace was over, so killed: process {', '.join(late)}")
        self.send(signal.SIGKILL)
        return True


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def launch(command: Sequence[str], processes: int, devices: int, *, restart: int, grace: float, port: int) -> int:
    """Runs `command` in all processes, again up to `restart` times while it fails; returns the exit code."""
    stopped: list[int] = []
    group: list[Group] = []

    def passed_on(number: int, _: object) -> None:
        stopped.append(number)
        for each in group:
            each.stop(number, grace)

    before = {s: signal.signal(s, passed_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for attempt in range(restart + 1):
            # A port of its own for every attempt: the last one's may still be held.
            group[:] = [Group(command, processes, devices, port or free_port())]
            if stopped:  # while they were being started
                group[0].stop(stopped[0], 0 if len(stopped) > 1 else grace)
            code = group[0].wait(grace)
            if code == 0 or stopped or attempt == restart:
                return code
            _say(f"starting all again ({attempt + 1} of {restart})")
        return code
    finally:
        for each in group:
            each.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        description="Start the processes of a run on this machine, on CPU devices.",
        usage="%(prog)s [options] -- COMMAND ...",
    )
    parser.add_argument("--processes", type=int, default=2, help="how many (2)")
    parser.add_argument("--devices", type=int, default=4, help="CPU devices in each (4)")
    parser.add_argument("--restart", type=int, default=0, help="start all again up to so many times after a failure")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to save and end before SIGKILL (30)")
    parser.add_argument("--port", type=int, default=0, help="of process 0 on loopback (a free one)")
    options = parser.parse_args(own)
    if not command:
        parser.error("the command is missing: put it behind --, e.g. -- marsjax train config.yaml")
    for name, low in (("processes", 1), ("devices", 1), ("restart", 0), ("grace", 0), ("port", 0)):
        if getattr(options, name) < low:
            parser.error(f"--{name} {getattr(options, name)} must be at least {low}")
    try:
        return launch(
            command,
            options.processes,
            options.devices,
            restart=options.restart,
            grace=options.grace,
            port=options.port,
        )
    except FileNotFoundError as error:
        parser.error(f"no such program: {error.filename}")


if __name__ == "__main__":
    sys.exit(main())
