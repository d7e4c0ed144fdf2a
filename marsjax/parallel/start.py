"""The start of a run of several processes (one a host), and small values they agree on."""

import json
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge  # the public modules do not tell whether a backend is there without starting one
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marsjax.parallel.roll_call import LOOPBACK, StartError, roll_call

__all__ = [
    "LateAgreement",
    "StartError",
    "agree",
    "any_process",
    "barrier",
    "give_up",
    "is_main",
    "start_processes",
    "texts_of_all",
]

log = logging.getLogger(__name__)

AUTO = "auto"
START_TIMEOUT = 300.0  # seconds; a slice's hosts come up minutes apart
HEARTBEAT = 100  # seconds


@dataclass(frozen=True)
class _Settings:
    coordinator: str | None
    processes: int | None
    process_id: int | None


_joined: _Settings | None = None


def start_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    start_timeout: float | None = None,
    heartbeat: int | None = None,
) -> int:
    """Joins this process to the others of its run; returns their number. To be called before JAX is asked anything.

    What is not given is taken from MARSJAX_COORDINATOR, MARSJAX_PROCESSES, MARSJAX_PROCESS_ID and
    MARSJAX_START_TIMEOUT. Without a coordinator there is one process and nothing happens. A second call with the same
    settings does nothing. SIGTERM does afterwards what it did before; an
    exception that nobody catches ends the process at once (see `give_up`).

    Args:
        coordinator: "host:port" of process 0, the same in all processes; or "auto" on TPU slices (one or several, on
            TPU VMs or GKE), Slurm and Open MPI, where JAX finds address, number and id itself.
        processes: how many there are; not with "auto".
        process_id: 0 to processes - 1, each once; not with "auto".
        start_timeout: seconds to wait for all of them.
        heartbeat: seconds without a sign of life after which a process counts as dead, which ends the others.

    Raises:
        StartError: they did not all come in time, the port is taken, no cluster was found, or JAX was in use already.
        ValueError: settings that are half given, or out of range.
    """
    global _joined
    settings = _settings(coordinator, processes, process_id)
    timeout = _number("start_timeout", "MARSJAX_START_TIMEOUT", start_timeout, float, START_TIMEOUT)
    if not 0 < timeout < 1e6:
        raise ValueError(f"start_timeout={timeout:g} must be above 0, in seconds (MARSJAX_START_TIMEOUT)")
    beat = HEARTBEAT if heartbeat is None else heartbeat
    if isinstance(beat, bool) or not isinstance(beat, int) or beat < 1:
        raise ValueError(f"heartbeat={beat!r} must be a whole number of seconds, at least 1")
    if settings.coordinator is None:
        return 1
    if jax.distributed.is_initialized():
        if _joined in (settings, None):  # None: whoever started this process has joined it
            return jax.process_count()
        raise StartError(f"this process has joined a run as {_joined}; it cannot become {settings}")
    if xla_bridge.backends_are_initialized():  # JAX says so too, but only after the others have been waited for
        raise StartError(
            "the processes can only be joined before JAX is used in this one (devices, arrays, random keys): call "
            "start_processes() first"
        )
    if settings.coordinator == AUTO:
        _join_cluster(timeout, beat)
    else:
        _join(settings, timeout, beat)
    _joined = settings
    log.info("process %d of %d, %d devices", jax.process_index(), jax.process_count(), jax.device_count())
    return jax.process_count()


def give_up(code: int) -> int:
    """Ends this process with `code` at once if it is one of several, else returns `code`. For what ends in an error.

    A usual exit first waits for the other processes, minutes long, while they wait for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def is_main() -> bool:
    """Whether this is process 0, which writes and prints for all."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns once every process has come to the barrier of this name. One process: at once."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def agree(value: Any) -> Any:
    """The value of process 0, in all processes; `value` is anything JSON can hold (floats stay exact).

    As all of these, to be called by every process, in the same order and not from threads: it is a collective.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode() if is_main() else b"", np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    room = 1 << max(6, (length - 1).bit_length())  # few sizes, since each is a program to compile
    sent = np.zeros(room, np.uint8)
    sent[: len(text)] = text
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent))[:length].tobytes())


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process, in all of them; a collective, as `agree`."""
    if jax.process_count() == 1:
        return bool(flag)
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(bool(flag)))))


def texts_of_all(text: str) -> list[str]:
    """What each process says, by id, cut to a thousand bytes; a collective, as `agree`."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    sent = np.frombuffer(text.encode()[:1000].ljust(1000, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(sent))
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


class LateAgreement:
    """Whether a flag is set in any process, without waiting for the others: each call says what was so at the last one.

    With one process it is so at once. All processes call it equally often.
    """

    def __init__(self) -> None:
        self._before: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        if jax.process_count() == 1:
            return flag
        mesh = Mesh(np.array(jax.devices()), ("device",))
        flags = jax.make_array_from_process_local_data(
            NamedSharding(mesh, PartitionSpec("device")), np.full(jax.local_device_count(), flag)
        )
        before, self._before = self._before, _any(flags, NamedSharding(mesh, PartitionSpec()))
        return before is not None and bool(before)


@partial(jax.jit, static_argnums=1)
def _any(flags: jax.Array, everywhere: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(flags.any(), everywhere)


def _settings(coordinator: str | None, processes: int | None, process_id: int | None) -> _Settings:
    coordinator = coordinator or os.environ.get("MARSJAX_COORDINATOR") or None
    count = _number("processes", "MARSJAX_PROCESSES", processes, int)
    number = _number("process_id", "MARSJAX_PROCESS_ID", process_id, int)
    if coordinator is None:
        given = [f"{name}={value}" for name, value in (("processes", count), ("process_id", number)) if value]
        if given and count != 1:
            raise ValueError(
                f"{' and '.join(given)} without a coordinator: give the address host:port of process 0 "
                "(MARSJAX_COORDINATOR), or leave them out to run in one process"
            )
        return _Settings(None, None, None)
    if coordinator == AUTO:
        if count is not None or number is not None:
            raise ValueError(
                f"coordinator=auto finds processes and process_id itself, got processes={count}, process_id={number} "
                "(MARSJAX_PROCESSES, MARSJAX_PROCESS_ID): leave them out, or give host:port as coordinator"
            )
        return _Settings(AUTO, None, None)
    _address(coordinator)
    for name, variable, value in (
        ("processes", "MARSJAX_PROCESSES", count),
        ("process_id", "MARSJAX_PROCESS_ID", number),
    ):
        if value is None:
            raise ValueError(f"coordinator={coordinator} needs {name} too ({variable})")
    assert count is not None
    assert number is not None
    if count < 1:
        raise ValueError(f"processes={count} must be at least 1 (MARSJAX_PROCESSES)")
    if not 0 <= number < count:
        raise ValueError(f"process_id={number} is outside 0 to {count - 1}, as processes={count} (MARSJAX_PROCESS_ID)")
    return _Settings(coordinator, count, number)


def _number(name: str, variable: str, given: Any, kind: type, default: Any = None) -> Any:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int | float) or kind(given) != given:
            raise ValueError(f"{name}={given!r} must be {'a whole number' if kind is int else 'a number'}")
        return kind(given)
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} must be {'a whole number' if kind is int else 'a number'}") from None


def _address(coordinator: str) -> tuple[str, int]:
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(
            f"coordinator={coordinator!r} must be host:port with a port of 1 to 65535, or auto (MARSJAX_COORDINATOR)"
        )
    return host.strip("[]"), int(port)


def _join(settings: _Settings, timeout: float, heartbeat: int) -> None:
    assert settings.coordinator is not None
    assert settings.processes is not None
    assert settings.process_id is not None
    host, port = _address(settings.coordinator)
    roll_call((host, port), settings.processes, settings.process_id, timeout)
    # Loopback stays loopback: JAX would listen on all of the machine's addresses.
    bind = {"coordinator_bind_address": f"{host}:{port}"} if host in LOOPBACK else {}
    _initialize(
        coordinator_address=settings.coordinator,
        num_processes=settings.processes,
        process_id=settings.process_id,
        cluster_detection_method="deactivate",  # all is known: no look-ups of a cluster's metadata
        initialization_timeout=max(30, round(timeout)),
        heartbeat_timeout_seconds=heartbeat,
        **bind,
    )


def _join_cluster(timeout: float, heartbeat: int) -> None:
    late = threading.Timer(
        timeout,
        log.error,
        (
            "the processes of this cluster (coordinator=auto) did not all come within %g s; start the same command on "
            "every host, or raise start_timeout (MARSJAX_START_TIMEOUT). JAX ends this process now",
            timeout,
        ),
    )
    late.daemon = True
    late.start()
    try:
        # Later than our own message: JAX does not return from its time-out.
        _initialize(initialization_timeout=round(timeout) + 2, heartbeat_timeout_seconds=heartbeat)
    except ValueError as error:
        raise StartError(
            "coordinator=auto found no cluster (a TPU slice, Slurm or Open MPI) to join: leave the coordinator out to "
            f"run in one process, or give host:port, processes and process_id ({error})"
        ) from error
    finally:
        late.cancel()


def _initialize(**options: Any) -> None:
    try:
        jax.distributed.initialize(**options)
    except RuntimeError as error:
        raise StartError(f"JAX could not join the processes: {error}") from error
    told = sys.excepthook

    def tell_and_give_up(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        told(kind, error, trace)
        if issubclass(kind, Exception):
            give_up(1)

    sys.excepthook = tell_and_give_up
    # JAX now takes SIGTERM for a notice to be asked for, so that the signal alone would no longer end the process.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
