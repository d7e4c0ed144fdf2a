"""Compiled programs kept between runs of the command line. Importing the library turns nothing on."""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

OFF = "MARSJAX_NO_COMPILATION_CACHE"


def use_compilation_cache() -> Path | None:
    """Lets JAX keep compiled programs in `~/.cache/marsjax/xla` (XDG_CACHE_HOME is respected); returns where.

    JAX_COMPILATION_CACHE_DIR, which JAX reads itself, wins. None if MARSJAX_NO_COMPILATION_CACHE is set, or, with a
    warning, if the directory cannot be written: a run without a cache only starts more slowly.
    """
    import jax

    if os.environ.get(OFF):
        return None
    if chosen := jax.config.values["jax_compilation_cache_dir"]:
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = home / "marsjax" / "xla"
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        log.warning("compiled programs are not kept: %s (set XDG_CACHE_HOME, or %s=1)", error, OFF)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", 2**31)  # bytes; the least used go first
    return directory
