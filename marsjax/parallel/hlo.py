"""What a compiled program moves, read from its text: collectives, and bytes between HBM and the chip.

The compiler's own counts see the body of a loop once; here every computation counts as often as it runs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s16": 2, "u16": 2, "pred": 1,
         "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Neither moves bytes, or moves them inside a computation that is counted itself.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "custom-call",
         "call", "after-all", "iota", "partition-id", "replica-id"}  # fmt: skip


@dataclass(frozen=True)
class Array:
    kind: str
    shape: tuple[int, ...]
    on_chip: bool  # in the chip's own memory, not in HBM

    @property
    def nbytes(self) -> int:
        return SIZES.get(self.kind, 0) * math.prod(self.shape)


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str  # the line behind the opcode

    @property
    def called(self) -> list[str]:
        """The computations it runs, but for a loop's condition."""
        names = re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", self.rest)
        for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.rest):
            names += re.findall(r"%?([\w.\-]+)", group)
        return names


@dataclass(frozen=True)
class Collective:
    """One kind of collective on arrays of one shape. `wire`: bytes a chip sends in all of a step's `count` runs."""

    kind: str
    arrays: str
    group: int
    count: int
    nbytes: int  # of the larger side, once
    wire: float


@dataclass
class Program:
    """A compiled program: its computations, and how often a step runs each (loops of unknown length count once)."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""

    def runs(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)

        def run(name: str, times: int) -> None:
            counts[name] += times
            for instruction in self.computations.get(name, ()):
                for called in instruction.called:
                    if called in self.computations:
                        run(called, times * self._trips(instruction))

        run(self.entry, 1)
        return dict(counts)

    def _trips(self, instruction: Instruction) -> int:
        """How often a loop runs its body: the bound its condition compares a counter from 0 with. Else 1."""
        if instruction.opcode != "while":
            return 1
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-]+)", instruction.rest)
        body = {one.name: one for one in self.computations.get(condition[1] if condition else "", ())}
        for one in body.values():
            if one.opcode == "compare" and "direction=LT" in one.rest:
                bounds = [body[name].rest for name in one.operands if name in body and body[name].opcode == "constant"]
                if bounds and (found := re.match(r"(\d+)\)", bounds[0])):
                    return int(found[1])
        return 1

    def arrays(self) -> set[Array]:
        return {array for body in self.computations.values() for one in body for array in one.results}

    def collectives(self) -> list[Collective]:
        """All, the largest traffic first."""
        found: dict[tuple[str, str, int], list[float]] = {}
        channels = set()
        for name, times in self.runs().items():
            for one in self.computations[name]:
                kind = one.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                # One that runs beside other work stands in each computation it runs beside.
                if channel := re.search(r"channel_id=(\d+)", one.rest):
                    if (channel[1], times) in channels:
                        continue
                    channels.add((channel[1], times))
                payload = [a for a in one.results if a.shape or len(one.results) == 1]
                if one.opcode.endswith("-start") and kind != "all-reduce":  # (operands, results, …)
                    payload = payload[len(payload) // 2 :]
                size = sum(a.nbytes for a in payload)
                group = _group(one.rest)
                shapes = ", ".join(f"{a.kind}[{','.join(map(str, a.shape))}]" for a in payload[:2])
                entry = found.setdefault((kind, shapes + (", …" if len(payload) > 2 else ""), group), [0, 0, 0])
                entry[0] += times
                entry[1] = size * (group if kind == "reduce-scatter" else 1)
                entry[2] += times * _wire(kind, size, group)
        listed = [Collective(*key, int(count), int(size), wire) for key, (count, size, wire) in found.items()]
        return sorted(listed, key=lambda c: -c.wire)

    def hbm_bytes(self, *, inner: bool = True) -> int:
        """Bytes between HBM and the chip in one step; of branches the dearest counts. `inner`: with what loops,
        branches and calls do.

        The compiler's own count adds a weight's bytes up to three times where it is prefetched: read from HBM, written
        to the chip's memory, read there by the product.
        """
        return self._bytes_of(self.entry, inner)

    def _bytes_of(self, name: str, inner: bool) -> int:
        body = self.computations.get(name, ())
        total = _hbm_bytes(body)
        for one in body if inner else ():
            if one.opcode in ("while", "call", "conditional", "async-start"):
                parts = [self._bytes_of(called, inner) for called in one.called]
                total += self._trips(one) * (max(parts, default=0) if one.opcode == "conditional" else sum(parts))
        return total


def parse(text: str) -> Program:
    """Of `jax.stages.Compiled.as_text()`."""
    program, body = Program(), None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            body = program.computations.setdefault(header[2], [])
            program.entry = header[2] if header[1] else program.entry
            continue
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
        if found and body is not None:
            name, shapes, opcode, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
            body.append(Instruction(name, opcode, _arrays(shapes), operands, rest))
    return program


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(kind, tuple(int(d) for d in dims.split(",") if d), "S(1)" in (layout or ""))
        for kind, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", text)
    )


def _group(rest: str) -> int:
    """How many chips take part together."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([\w]+)'=(\d+)", found[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        return found[1].count("{")
    return 1


def _wire(kind: str, size: int, group: int) -> float:
    """Bytes a chip sends, by the ring algorithm; `size` of the result."""
    share = (group - 1) / max(group, 1)
    if kind == "all-reduce":
        return 2 * size * share
    if kind == "reduce-scatter":
        return size * (group - 1)
    return size if kind == "collective-permute" else size * share


def _hbm_bytes(body: Iterable[Instruction]) -> int:
    where: dict[str, int] = {}  # bytes of a result that lies in HBM
    total = 0
    for one in body:
        where[one.name] = sum(a.nbytes for a in one.results if not a.on_chip)
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            continue
        if one.name.startswith("async-collective"):  # writes what it gathers once, from its start to its end
            total += max((a.nbytes for a in one.results), default=0) if "start" in one.name else 0
            continue
        if one.opcode.endswith("-start"):
            sides = [a.on_chip for a in one.results]
            if any(sides) != all(sides):  # one side of the move is HBM: what moves is the smaller
                total += min((a.nbytes for a in one.results if a.nbytes > 4), default=0)
            continue
        if one.opcode in ("dynamic-slice", "slice", "gather"):  # reads what it gives
            total += 2 * where[one.name]
            continue
        if one.opcode in ("dynamic-update-slice", "scatter"):  # writes in place
            update = where.get(one.operands[1], 0) if len(one.operands) > 1 else 0
            total += 2 * update
            continue
        # What only passes through, in its place, moves nothing.
        through = re.findall(r"\{(\d*)\}: \((\d+), \{\d*\}", one.rest) if one.opcode == "fusion" else []
        results = [a.nbytes for a in one.results]
        total += where[one.name] - sum(results[int(i or 0)] for i, _ in through if not one.results[int(i or 0)].on_chip)
        kept = {int(operand) for _, operand in through}
        total += sum(where.get(operand, 0) for i, operand in enumerate(one.operands) if i not in kept)
    return total
