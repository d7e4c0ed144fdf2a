"""The start of several processes: joined on loopback, what they agree on, and every way in which it goes wrong."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from marsjax.parallel import start
from marsjax.parallel.roll_call import roll_call
from marsjax.parallel.start import StartError, start_processes

ROOT = Path(__file__).parents[2]
VARIABLES = ("MARSJAX_COORDINATOR", "MARSJAX_PROCESSES", "MARSJAX_PROCESS_ID", "MARSJAX_START_TIMEOUT")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    """A process that has used no JAX yet."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT, timeout=120)


JOINED = """
from marsjax.parallel.start import agree, any_process, barrier, is_main, start_processes
assert start_processes() == 2
assert start_processes() == 2  # again: nothing
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
count, me = jax.device_count(), jax.process_index()
assert (count, jax.local_device_count(), is_main()) == (4, 2, me == 0)
mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,))
rows = jax.make_array_from_callback((count,), NamedSharding(mesh, P("data")), lambda i: 10.0 ** np.arange(count)[i])
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))(rows)
assert agree({"process": me, "float": 0.1 + 0.2, "text": "a" * 300 * (me == 0)})["process"] == 0
assert agree(0.1 + me) == 0.1 and agree("ä" * 100 * (1 - me)) == "ä" * 100 and agree("" if me == 0 else "x") == ""
assert any_process(me == 1) is True and any_process(False) is False
barrier("end")
print("total", float(total[0]))
"""


def test_two_processes_of_two_devices_sum_over_a_global_array():
    run = subprocess.run(
        [sys.executable, "launch/local.py", "--processes", "2", "--devices", "2", "--", sys.executable, "-c", JOINED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    assert "[process 0] total 1111.0" in run.stdout
    assert "[process 1] total 1111.0" in run.stdout


@pytest.mark.parametrize("end", ["raise ValueError('wrong')", "print('wrong'); sys.exit(give_up(1))"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_does_not_wait_for_the_others(failing, end):
    """JAX's own exit would wait five minutes for the other, which waits for this one."""
    code = (
        "import sys, time\nfrom marsjax.parallel.start import agree, give_up, start_processes\nstart_processes()\n"
        f"import jax\nagree(1)\nif jax.process_index() == {failing}:\n    {end}\ntime.sleep(50)"
    )
    words = ["launch/local.py", "--devices", "1", "--", sys.executable, "-c", code]
    begun = time.monotonic()
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stdout
    assert time.monotonic() - begun < 40
    assert "wrong" in run.stdout


def test_sigterm_keeps_its_meaning():
    """JAX's own handler would leave the process running."""
    done = python(
        "import os, signal, time\nfrom marsjax.parallel.start import start_processes\n"
        f"start_processes('127.0.0.1:{free_port()}', 1, 0)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)"
    )
    assert done.returncode == -15, done.stderr


def test_without_settings_there_is_one_process_and_nothing_happens():
    assert start_processes() == 1
    assert not jax.distributed.is_initialized()
    assert start.is_main()
    assert start.agree({"as": ("it", "is")}) == {"as": ("it", "is")}
    assert (start.any_process(True), start.any_process(False)) == (True, False)
    start.barrier("alone")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"coordinator": "h:1"}, "needs processes too (MARSJAX_PROCESSES)"),
        ({"coordinator": "h:1", "processes": 2}, "needs process_id too (MARSJAX_PROCESS_ID)"),
        ({"processes": 2, "process_id": 1}, "processes=2 and process_id=1 without a coordinator"),
        ({"process_id": 1}, "process_id=1 without a coordinator"),
        ({"coordinator": "h", "processes": 2, "process_id": 0}, "'h' must be host:port"),
        ({"coordinator": "h:0", "processes": 2, "process_id": 0}, "port of 1 to 65535"),
        ({"coordinator": "h:65536", "processes": 2, "process_id": 0}, "port of 1 to 65535"),
        ({"coordinator": "h:x", "processes": 2, "process_id": 0}, "port of 1 to 65535"),
        ({"coordinator": ":80", "processes": 2, "process_id": 0}, "must be host:port"),
        ({"coordinator": "h:1", "processes": 0, "process_id": 0}, "processes=0 must be at least 1"),
        ({"coordinator": "h:1", "processes": 2, "process_id": 2}, "process_id=2 is outside 0 to 1"),
        ({"coordinator": "h:1", "processes": 2, "process_id": -1}, "process_id=-1 is outside 0 to 1"),
        ({"coordinator": "h:1", "processes": 2.5, "process_id": 0}, "processes=2.5 must be a whole number"),
        ({"coordinator": "auto", "processes": 2}, "coordinator=auto finds processes and process_id itself"),
        ({"start_timeout": 0}, "start_timeout=0 must be above 0"),
        ({"heartbeat": 0}, "heartbeat=0 must be a whole number"),
    ],
)
def test_wrong_settings_are_refused(arguments, words):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (compared below)
        start_processes(**arguments)
    assert words in str(raised.value)


def test_variables_are_read_and_arguments_win(monkeypatch):
    monkeypatch.setenv("MARSJAX_COORDINATOR", "there:99")
    monkeypatch.setenv("MARSJAX_PROCESSES", "4")
    monkeypatch.setenv("MARSJAX_PROCESS_ID", "four")
    with pytest.raises(ValueError, match="MARSJAX_PROCESS_ID='four' must be a whole number"):
        start_processes()
    with pytest.raises(ValueError, match="process_id=9 is outside 0 to 3"):
        start_processes(process_id=9)
    with pytest.raises(ValueError, match="process_id=3 is outside 0 to 2"):
        start_processes(processes=3, process_id=3)
    monkeypatch.setenv("MARSJAX_START_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MARSJAX_START_TIMEOUT='soon' must be a number"):
        start_processes(process_id=1)


def test_after_jax_was_used_it_is_too_late_at_once():
    jax.devices()
    with pytest.raises(StartError, match="call start_processes\\(\\) first"):
        start_processes("127.0.0.1:9", 2, 1)


def test_auto_without_a_cluster_says_so():
    done = python("from marsjax.parallel.start import start_processes\nstart_processes('auto', start_timeout=5)")
    assert "StartError: coordinator=auto found no cluster" in done.stderr


def call_all(port: int, calls: list[tuple[int, int]], timeout: float) -> list[str]:
    """What each process of [(id, processes)] is told, "" for all being well."""
    told = [""] * len(calls)

    def call(at: int, number: int, processes: int) -> None:
        try:
            roll_call(("127.0.0.1", port), processes, number, timeout)
        except StartError as error:
            told[at] = str(error)

    threads = [threading.Thread(target=call, args=(at, *who)) for at, who in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return told


def test_the_roll_call_is_complete():
    assert call_all(free_port(), [(2, 3), (1, 3), (0, 3)], 20) == [""] * 3
    assert call_all(free_port(), [(0, 1)], 20) == [""]


def test_all_that_came_are_told_who_is_missing():
    port = free_port()
    told = call_all(port, [(0, 4), (2, 4)], 1.5)
    assert told[0] == told[1]
    for words in ("4 processes", f"127.0.0.1:{port}", "1.5 s", "missing: processes 1, 3", "MARSJAX_START_TIMEOUT"):
        assert words in told[0]


def test_a_missing_process_0_is_named():
    (told,) = call_all(free_port(), [(1, 2)], 0.5)
    assert "process 1 did not reach process 0: Connection refused" in told


def test_an_id_given_twice_and_another_number_are_told_to_all():
    told = call_all(free_port(), [(0, 3), (1, 3), (1, 3)], 20)
    assert all("two processes have the id 1" in text for text in told)
    told = call_all(free_port(), [(0, 3), (1, 2)], 20)
    assert told == ["process 1 was started as one of 2, process 0 as one of 3"] * 2


def test_strangers_and_processes_that_went_away_do_not_count():
    port = free_port()
    main = threading.Thread(target=roll_call, args=(("127.0.0.1", port), 2, 0, 30))
    main.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b'{"process_id": 1, "processes": 2, "x":', b"[1]\n"):
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(words)
                break
            except ConnectionRefusedError:
                continue
    roll_call(("127.0.0.1", port), 2, 1, 30)
    main.join(timeout=30)
    assert not main.is_alive()


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError, match=f"process 0 cannot listen on 127.0.0.1:{port}: Address already in use"):
            roll_call(("127.0.0.1", port), 2, 0, 5)
