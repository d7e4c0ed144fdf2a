"""TPU slices by name: how many chips, how they are wired, what a chip can do.

v4-N and v5p-N count TensorCores, two a chip; v5e-N (v5litepod-N) and v6e-N count chips.
"""

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Of one chip. `hbm`: bytes a program may use, as the compiler says. From the vendor's data sheets: `flops` a
    second in bfloat16, `bandwidth` of the HBM, and of the `links` of its network (all, one direction), bytes a second.
    """

    name: str
    kind: str  # as jax.Device.device_kind says
    cores: int  # counted in a slice's name
    hbm: float
    flops: float
    bandwidth: float
    links: float
    dimensions: int


CHIPS = {
    "v4": Chip("v4", "TPU v4", 2, 30.75 * GIB, 275e12, 1228e9, 300e9, 3),
    "v5e": Chip("v5e", "TPU v5 lite", 1, 15.75 * GIB, 197e12, 819e9, 200e9, 2),
    "v5p": Chip("v5p", "TPU v5", 2, 95.74 * GIB, 459e12, 2765e9, 600e9, 3),
    "v6e": Chip("v6e", "TPU v6 lite", 1, 31.25 * GIB, 918e12, 1640e9, 448e9, 2),
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p"}
_SHAPES = {
    2: {n: f"{a}x{b}" for n, a, b in ((1, 1, 1), (4, 2, 2), (8, 2, 4), (16, 4, 4), (32, 4, 8), (64, 8, 8), (128, 8, 16),
                                      (256, 16, 16))},
    3: {n: f"{a}x{b}x{c}" for n, a, b, c in (
        (4, 2, 2, 1), (8, 2, 2, 2), (16, 2, 2, 4), (32, 2, 4, 4), (64, 4, 4, 4), (128, 4, 4, 8), (256, 4, 8, 8),
        (512, 8, 8, 8), (1024, 8, 8, 16), (2048, 8, 16, 16))},
}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    chip: Chip
    shape: str  # such as 2x2x4

    @property
    def chips(self) -> int:
        count = 1
        for size in self.shape.split("x"):
            count *= int(size)
        return count

    @property
    def name(self) -> str:
        """Such as v5p-32."""
        return f"{self.chip.name}-{self.chips * self.chip.cores}"

    @property
    def topology(self) -> str:
        """As `jax.experimental.topologies` takes it, such as v5p:2x2x4."""
        return f"{self.chip.name}:{self.shape}"


def parse_slice(text: str) -> Slice:
    """v5p-32, v5litepod-64, or generation and topology: v5p:2x2x4. Raises ValueError with what is known."""
    found = re.fullmatch(r"(v\d\w*?)(?:-(\d+)|:(\d+(?:x\d+)+))", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is no TPU slice; write v5p-32, v4-64, v5e-64, v6e-16 or v5p:2x2x4")
    generation, count, shape = found.groups()
    chip = CHIPS.get(_ALIASES.get(generation, generation))
    if chip is None:
        raise ValueError(f"{text!r}: unknown TPU generation {generation}; known are {', '.join(CHIPS)}")
    if shape is not None:
        if len(shape.split("x")) != chip.dimensions:
            raise ValueError(f"{text!r}: a {chip.name} slice has {chip.dimensions} dimensions")
        return Slice(chip, shape)
    shapes = _SHAPES[chip.dimensions]
    chips, rest = divmod(int(count), chip.cores)
    if rest or chips not in shapes:
        known = ", ".join(f"{chip.name}-{n * chip.cores}" for n in shapes)
        raise ValueError(
            f"{text!r} is no slice of that kind; known are {known}; or give its topology, {chip.name}:AxB…"
        )
    return Slice(chip, shapes[chips])


def chip_of(device_kind: str) -> Chip | None:
    """The chip of `jax.Device.device_kind`; None for one that is not in the table."""
    return next((chip for chip in CHIPS.values() if chip.kind == device_kind), None)
