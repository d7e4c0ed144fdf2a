"""Who is there before JAX joins the processes of a run.

`jax.distributed.initialize` kills the process (abort, with a stack trace) if another one is missing when its time is
up, and crashes if the port is taken. So the processes first meet here, on the same address, where what is wrong can
be said: who did not come, who came twice, who expects another number.
"""

import json
import socket
import time

ANSWER_WITHIN = 5.0  # seconds for a caller to say who it is, so that a stranger on the port cannot hold the run up
LOOPBACK = ("127.0.0.1", "localhost")
PAUSE = 0.2  # seconds between two attempts to reach process 0


class StartError(RuntimeError):
    """The processes of a run cannot be joined; the message says which, where, and what to change."""


def roll_call(address: tuple[str, int], processes: int, process_id: int, timeout: float) -> None:
    """Returns in every process once all `processes` have called; process 0 listens on `address`.

    Raises StartError in every process that called, if some have not after `timeout` seconds, an id came twice, the
    processes disagree about their number, or the port is taken.
    """
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _listen(address, processes, deadline, timeout)
    else:
        _call(address, processes, process_id, deadline, timeout)


def _listen(address: tuple[str, int], processes: int, deadline: float, timeout: float) -> None:
    host, port = address
    came: dict[int, socket.socket] = {}
    try:
        if host in LOOPBACK:
            server = socket.create_server((host, port), backlog=max(128, processes))
        else:  # the name others know this machine by need not be one of its own addresses
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            server = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=max(128, processes))
    except OSError as error:
        raise StartError(
            f"process 0 cannot listen on {host}:{port}: {error.strerror}; choose another port in the coordinator's "
            "address, the same in all processes"
        ) from error
    with server:
        try:
            while len(came) < processes - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, processes)) - set(came))
                    raise StartError(_too_late(address, processes, timeout, f"missing: {_list(missing)}")) from None
                _register(connection, came, processes)
            _tell(came, "")
        except StartError as error:
            _tell(came, str(error))
            raise
        finally:
            for connection in came.values():
                connection.close()


def _register(connection: socket.socket, came: dict[int, socket.socket], processes: int) -> None:
    connection.settimeout(ANSWER_WITHIN)
    try:
        said = json.loads(connection.makefile("rb").readline(200))
        number, expected = int(said["process_id"]), int(said["processes"])
    except (OSError, ValueError, TypeError, KeyError):  # not one of ours
        connection.close()
        return
    before = came.get(number)
    came[number] = connection  # before any error, so that it hears of it too
    if expected != processes:
        raise StartError(f"process {number} was started as one of {expected}, process 0 as one of {processes}")
    if before is not None:
        gone = _closed(before)
        if not gone:
            _tell({number: before}, f"two processes have the id {number}")
        before.close()
        if not gone:
            raise StartError(f"two processes have the id {number}; ids must be 0 to {processes - 1}, each once")


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(ANSWER_WITHIN)


def _tell(came: dict[int, socket.socket], error: str) -> None:
    for connection in came.values():
        try:
            connection.sendall(json.dumps({"error": error}).encode() + b"\n")
        except OSError:
            continue  # it went away meanwhile; JAX's own start will miss it


def _call(address: tuple[str, int], processes: int, process_id: int, deadline: float, timeout: float) -> None:
    hello = json.dumps({"process_id": process_id, "processes": processes}).encode() + b"\n"
    last = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(hello)
                # A little longer than process 0, which knows who is missing.
                connection.settimeout(left + ANSWER_WITHIN)
                answer = json.loads(connection.makefile("rb").readline(10_000))
        except OSError as error:  # not up yet, or its name not known yet
            last = error.strerror or str(error) or last
        except ValueError:
            last = "what listens there is no process 0 of marsjax, or it ended"
        else:
            if answer["error"]:
                raise StartError(answer["error"])
            return
        time.sleep(min(PAUSE, max(0.0, deadline - time.monotonic())))
    raise StartError(_too_late(address, processes, timeout, f"process {process_id} did not reach process 0: {last}"))


def _too_late(address: tuple[str, int], processes: int, timeout: float, what: str) -> str:
    host, port = address
    return (
        f"{processes} processes were expected at {host}:{port} within {timeout:g} s; {what}. Start them all with the "
        "same address and number, or raise start_timeout (MARSJAX_START_TIMEOUT)"
    )


def _list(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"process {shown}{more}" if len(numbers) == 1 else f"processes {shown}{more}"
