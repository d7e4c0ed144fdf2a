"""Meshes that cannot be: refused with what is wrong and what would be right."""

import jax
import pytest

from marsjax.parallel.sharding import make_mesh


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 1, "tp": 1}, "tp is no axis of a mesh; the axes are slice, data, fsdp, tensor"),
        ({"data": 0}, "data must be a positive integer, got 0"),
        ({"tensor": 2.0}, "tensor must be a positive integer, got 2.0"),
    ],
)
def test_bad_axes(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(**sizes)


def test_too_few_devices():
    there = jax.device_count()
    with pytest.raises(
        ValueError, match=f"data=2, tensor={there} takes {2 * there} devices.* there are {there} "
    ) as told:
        make_mesh(data=2, tensor=there)
    assert f"XLA_FLAGS=--xla_force_host_platform_device_count={2 * there}" in str(told.value)


def test_all_axes():
    assert dict(make_mesh(slice=1, data=1, fsdp=1, tensor=1).shape) == {"slice": 1, "data": 1, "fsdp": 1, "tensor": 1}
