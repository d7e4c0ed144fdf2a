"""A slot plan as text: a row a slot, what it stands for, what it sees, what its prediction is for."""

from marsjax.decoding.plans import DRAFT, MASK, SlotPlan


def draw(plan: SlotPlan) -> str:
    """A picture of `plan`; t is the position of the root, the last token that is known."""
    numbers = iter(range(1, plan.size + 1))
    rows = []
    for slot in range(plan.size):
        kind = plan.kinds[slot]
        if kind == MASK:
            name = "mask"
        elif kind == DRAFT:
            name = f"draft {next(numbers)}"
        else:
            name = "root" if slot == plan.root else "pending"
        sees = " ".join("■" if seen else "·" for seen in plan.sees[slot][: plan.size if plan.both_ways else slot + 1])
        rows.append((str(slot), name, _at(plan.depth[slot]), sees, _use(plan, slot)))
    titles = ("slot", "what", "at", "sees the cache and slots 0 …", "its prediction")
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows)]
    behind = f"{plan.pending} pending" + (f", {plan.drafts} drafts" if plan.drafts else "")
    masks = plan.masks
    about = f"{plan.name}: {plan.size} {_many('slot', plan.size)} ({behind}, {masks} {_many('mask', masks)}), "
    about += f"up to {plan.window} {_many('token', plan.window)} a forward"
    about += "; an example, the form follows the probabilities" * plan.dynamic
    return "\n".join([about, "", *(line.rstrip() for line in lines)])


def _many(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"


def _at(depth: int) -> str:
    return "t" if depth == 0 else f"t{depth:+d}"


def _use(plan: SlotPlan, slot: int) -> str:
    following = _at(plan.depth[slot] + 1)
    if plan.both_ways:
        return f"{following}, taken if sure or the surest" if slot in plan.judged else "none needed"
    if slot == plan.root:
        return f"{following}, taken always"
    if slot in plan.heads:
        return f"{following}, taken if all drafts {'up to here' if plan.is_chain else 'on its path'} are right"
    for head, group in enumerate(plan.groups):
        if slot in group:
            last = f"{head} of {plan.drafts} were right" if plan.is_chain else f"{_head(head)} is accepted last"
            if plan.continues:
                return f"{following}, taken while sure" + (f", if {last}" if plan.drafts else "")
            guess = "draft" if plan.is_chain else "guesses for draft"
            return f"{guess} {group.index(slot) + 1} of the next step, if {last}"
    return "none needed"


def _head(head: int) -> str:
    return f"draft {head}" if head else "the root"
