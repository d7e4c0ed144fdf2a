"""Compiling for TPU slices that are not here, with the real compiler (the `libtpu` wheel; no TPU, no network)."""

import math
import os
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax

from marsjax.parallel.slices import Slice

# A matrix product whose weights are gathered could be cut along the gathered axis, a part for each neighbour's shard.
# Where that axis is summed over, as fsdp's is, every part reads and writes the whole result: of a 7B step on 16 chips
# 2.4 times the HBM bytes of gathering first.
TPU_COMPILER_OPTIONS: dict[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


class NoCompiler(RuntimeError):
    """The TPU compiler is not installed."""


def devices(slice_: Slice, slices: int = 1) -> Sequence[Any]:
    """The devices of one or several slices, to lay a mesh over. Raises NoCompiler, ValueError for unknown shapes."""
    if find_spec("libtpu") is None:
        raise NoCompiler("compiling for a TPU needs its compiler, but no TPU: pip install 'marsjax[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it waits for a cloud machine's metadata
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is opened, so others may compile meanwhile
    # Or it says at length that it does not know the machine.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", slice_.name)
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if slice_.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as JAX shows them
    if slice_.chips == 1:  # hosts of four are what the compiler expects
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=slice_.topology, **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler does not know {slice_.topology}: {str(error).splitlines()[0]}") from error


def compile_(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
    """(the program, seconds)."""
    began = time.perf_counter()
    return lowered.compile(compiler_options=TPU_COMPILER_OPTIONS), time.perf_counter() - began


def text(compiled: jax.stages.Compiled) -> str:
    """The program as text. Raises NoCompiler where jax cannot read what a compiler of another version wrote."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise NoCompiler(
            f"this libtpu writes programs that jax {jax.__version__} cannot read; install the one that belongs to it: "
            "pip install 'marsjax[tpu]'"
        ) from error


def out_of_memory(error: Exception) -> float | None:
    """The bytes a program would need that the compiler refuses for want of memory; None for other errors."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    sizes = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    for pattern in (r"Used ([\d.]+)([KMGT]) of", r"required for HLO temporaries \(([\d.]+)([KMGT])\)"):
        if found := re.search(pattern, text):
            return float(found[1]) * sizes[found[2]]
    return math.inf
