"""Directories that are written as a whole: beside their place, and put there at the end."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marsjax.parallel.start import barrier, is_main
from marsjax.weights.safetensors_files import Outgoing


def check_target(directory: str | Path, kind: str = "export", marker: str = "config.json") -> Path:
    """Where an export to `directory` goes, absolute. Raises FileExistsError where it would do harm.

    The directory as a whole is put in the old one's place. That cannot be done to a mount point, takes the ground from
    under whoever works inside, and is no way to treat a directory that holds something else: one of this `kind` has a
    file `marker`.
    """
    target = Path(directory).expanduser().resolve()
    if not target.exists():
        return target
    reason = None
    if not target.is_dir():
        reason = "is a file"
    elif Path.cwd().is_relative_to(target):
        reason = "is the working directory or holds it"
    elif target.is_mount():
        reason = "is a mount point"
    elif any(target.iterdir()) and not (target / marker).is_file():
        reason = f"holds other things than an {kind} (files, but no {marker})"
    if reason is not None:
        raise FileExistsError(f"{target} {reason}; name a directory that is new, empty or an earlier {kind}")
    return target


def publish(target: Path, tensors: Sequence[Outgoing], write: Callable[[Path], None], belongs: re.Pattern[str]) -> Path:
    """Lets `write` fill a new directory and puts it in the place of `target`, so a crash leaves the old one or none.

    Files of the old one that do not belong to such a directory move along. Every process must call this; the first one
    writes, the tensors in the order of `tensors`.
    """
    if not is_main():  # gathers its part of each tensor for the one that writes
        for tensor in tensors:
            tensor.value()
        barrier("exported")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        work.chmod(0o777 & ~_umask())
        write(work)
        _replace(target, work, belongs)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    barrier("exported")
    return target


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _replace(target: Path, work: Path, belongs: re.Pattern[str]) -> None:
    if not target.exists():
        work.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(old / "was")
    work.rename(target)
    for path in (old / "was").iterdir():
        if not belongs.fullmatch(path.name) and not (target / path.name).exists():
            path.rename(target / path.name)
    shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
