import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MARSJAX_NO_COMPILATION_CACHE", "1")

import jax


@pytest.fixture(autouse=True)
def room_for_programs():
    """Forgets compiled programs before there are too many: each holds some of a process's memory maps, of which the
    kernel allows 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
