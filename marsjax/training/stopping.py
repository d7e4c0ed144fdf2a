"""Ctrl-C and SIGTERM (what schedulers send before they take a machine away) end a run behind a whole step."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """At once, in this process alone."""


class StopAsked:
    """Within `with`, the first SIGINT or SIGTERM only makes this true; the second interrupts where it is.

    A step gives its old state away before it has the new one, so an interrupt inside it would leave nothing to save.
    Outside the main thread, where Python lets nobody handle signals, it stays false.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self._asked

    def __enter__(self) -> "StopAsked":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise Interrupted("interrupted; the same command goes on from the newest checkpoint")
        self._asked = True
        os.write(2, b"\nstopping when this step is done and saved; once more stops at once\n")  # print may be under way
