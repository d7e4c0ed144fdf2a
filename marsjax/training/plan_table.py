"""A plan as text for people."""

from marsjax.training.plan import Plan

_SHOWN = 8  # collectives


def show(plan: Plan) -> str:
    """Memory against the chip's HBM, work, traffic, and the least time of a step."""
    chip = plan.slice.chip
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one chip"
    slices = f"{plan.slices} x " if plan.slices > 1 else ""
    lines = [
        f"{slices}{plan.slice.name} ({plan.slice.topology}): {plan.chips} chips, mesh {mesh}; "
        f"{plan.parameters / 1e9:.3g} B parameters",
        ", ".join(f"{name} {value}" for name, value in plan.work.items()),
        "",
        "memory of a chip, GiB",
        *(f"  {kind:<16}{size / 2**30:8.2f}" for kind, size in plan.memory.items() if size >= 2**20),
        f"  {'together':<16}{plan.needed / 2**30:8.2f} of {chip.hbm / 2**30:.2f}",
        f"  fits, {plan.margin / 2**30:.2f} GiB ({plan.margin / chip.hbm:.0%}) to spare"
        if plan.fits
        else f"  DOES NOT FIT: {-plan.margin / 2**30:.2f} GiB too much; data.accumulation, compute.remat or chips",
    ]
    lines += [
        "",
        f"a step: {plan.flops / 1e15:.4g} PFLOP, {plan.model_flops / 1e15:.4g} without what is computed twice",
    ]
    if not plan.seconds:
        return "\n".join(lines)
    tokens = plan.tokens / plan.step_seconds
    per = " for each token a forward gives" if "lanes" in plan.work else ""
    lines += [
        f"        {plan.hbm_bytes / 1e9:.4g} GB between HBM and chip, "
        f"{sum(c.wire for c in plan.collectives) / 1e9:.4g} GB sent, a chip",
        *(
            f"          {c.count:>4} x {c.kind:<18} {c.arrays:<40} of {c.group:>3} chips {c.wire / 1e9:9.3f} GB"
            for c in plan.collectives[:_SHOWN]
            if c.wire >= 5e5
        ),
        "        at least " + ", ".join(f"{kind} {s:.3g} s" for kind, s in plan.seconds.items()),
        f"        {plan.step_seconds:.3g} s at best, {tokens:,.0f} tokens/s{per}, "
        f"utilisation at most {plan.utilisation:.0%}, "
        f"{plan.step_seconds * plan.chips / 3600 * 1000:.3g} chip hours a thousand steps",
        f"compiled in {plan.compile_seconds:.0f} s",
    ]
    return "\n".join(lines)


def choice(chosen: Plan | None, tried: int) -> str:
    """The last line of a search."""
    if chosen is None:
        return f"none of {tried} fits"
    mesh = " ".join(f"parallel.{axis}={size}" for axis, size in chosen.mesh.items() if axis != "slice")
    return (
        f"best of {tried}: {mesh} data.accumulation={chosen.work['accumulation']} ({chosen.step_seconds:.3g} s a step)"
    )
