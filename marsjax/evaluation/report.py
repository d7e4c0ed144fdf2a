"""The demo's report: a JSON file for programs, a self-contained HTML page for people."""

import html
import io
import json
from pathlib import Path
from typing import Any

from marsjax.evaluation import shading

_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.6rem;margin-bottom:.2rem} h2{font-size:1.15rem;margin-top:2.2rem}
.lead{color:#444;margin-top:0} .note{color:#555;font-size:.9rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;font-size:.92rem}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #e3e3e3}
th:first-child,td:first-child{text-align:left}
thead th{border-bottom:2px solid #999;font-weight:600;vertical-align:bottom} tr.best td{background:#eef8ec}
.answer{background:#fafafa;border:1px solid #e3e3e3;border-radius:6px;padding:.8rem 1rem;
margin:.4rem 0 1rem;line-height:1.9}
.question{font-style:italic} svg{max-width:100%;height:auto}
"""


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_html(path: Path, report: dict[str, Any]) -> None:
    """`report` as `marsjax.demo.demo` makes it; the page needs no network and no other file."""
    best = report["best"]
    title = f"{best['tokens_per_forward']:.2f} tokens per forward pass"
    examples = "".join(
        f"<p>τ = {e['tau']:g}: {e['tokens']} tokens in {e['forwards']} forward passes "
        f"({e['tokens'] / e['forwards']:.2f} a pass)</p><div class=answer>{e['html']}</div>"
        for e in report["example"]["answers"]
    )
    lead = f"""At τ = {best["tau"]:g}, with {best["accuracy"]:.1%} of the answers right. One token at a time, the same
model has {report["mars"][0]["accuracy"]:.1%}, and before MARS fine-tuning it had {report["ar"]["accuracy"]:.1%}
({report["ar"]["problems"]} held-out problems)."""
    body = f"""<h2>Speed and quality</h2>{_curve(report)}
<p class=note>Each point is a threshold τ: the model goes on accepting its own predictions while it gives each at least
probability τ. At τ = 1 it gives one token a forward pass. The control is the model before fine-tuning, shown the same
masks.</p>
{_table(report)}
<p class=note>Tokens per forward for phrases and numbers apart: numbers are digits, and names taken from the question.
Tokens per second are those of {html.escape(report["machine"])}, batches of {report["batch_size"]}, prefill and
compilation apart; a small model on a processor is not where forward passes are dear. "Same text" is the share of
answers equal, token for token, to what the model writes one token at a time.</p>
<h2>One answer</h2><p class=question>{html.escape(report["example"]["question"])}</p>
{examples}{legend()}"""
    path.write_text(page(title, lead, body, html.escape(report["summary"])), encoding="utf-8")


def page(title: str, lead: str, body: str, note: str = "") -> str:
    """A page around HTML with shaded answers, which needs no network and no other file; `title` is text."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>marsjax demo: {title}</title><style>{_STYLE}{shading.css()}</style></head><body>
<h1>{title}</h1>
<p class=lead>{lead}</p>
{body}
<p class=note>{note}</p>
</body></html>
"""


def legend() -> str:
    """What the shades say."""
    shades = "".join(f'<span class="chunk c{n}">&nbsp;{n}{"+" if n == 5 else ""}&nbsp;</span> ' for n in range(1, 6))
    return f"<p class=note>Tokens accepted in one forward pass: {shades}</p>"


def _table(report: dict[str, Any]) -> str:
    head = ("decoding", "accuracy", "tokens per forward", "phrases", "numbers", "tokens per second", "same text")
    rows = [("before MARS, one token at a time", report["ar"])]
    rows += [(f"MARS, τ = {row['tau']:g}", row) for row in report["mars"]]
    rows += [(f"control, τ = {row['tau']:g}", row) for row in report["control"]]
    body = "".join(
        f"<tr{' class=best' if row is report['best'] else ''}><td>{name}</td><td>{row['accuracy']:.1%}</td>"
        f"<td>{row['tokens_per_forward']:.2f}</td><td>{row['tokens_per_forward_phrases']:.2f}</td>"
        f"<td>{row['tokens_per_forward_numbers']:.2f}</td><td>{row['tokens_per_second']:,.0f}</td>"
        f"<td>{row['identical_to_ar']:.1%}</td></tr>"
        for name, row in rows
    )
    return f"<table><thead><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr></thead><tbody>{body}</tbody></table>"


def _curve(report: dict[str, Any]) -> str:
    """The speed-quality curve as inline SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, whose choice of backend is the caller's

    with rc_context({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "marsjax"}):
        figure = Figure(figsize=(8.5, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.axhline(100 * report["ar"]["accuracy"], color="#999", linewidth=1, linestyle="--")
        axes.annotate(
            "before MARS, one token at a time", (1.0, 100 * report["ar"]["accuracy"]), color="#555",
            xycoords=axes.get_yaxis_transform(), ha="right", textcoords="offset points", xytext=(-4, 6),
        )  # fmt: skip
        for name, colour, marker in (("mars", "#1b7837", "o"), ("control", "#b2182b", "x")):
            points = [(row["tokens_per_forward"], 100 * row["accuracy"], row["tau"]) for row in report[name]]
            x, y, _ = zip(*points, strict=True)
            label = "MARS" if name == "mars" else "control: not fine-tuned, given masks"
            axes.plot(x, y, color=colour, marker=marker, label=label)
            for i, (at_x, at_y, tau) in enumerate(points if name == "mars" else ()):
                below = i % 2 == 0  # neighbours on different sides, or they run into each other
                axes.annotate(
                    f"τ={tau:g}", (at_x, at_y), textcoords="offset points", xytext=(0, -17 if below else 8),
                    ha="center", color=colour,
                )  # fmt: skip
        axes.set_xlabel("tokens per forward pass")
        axes.set_ylabel("correct answers, %")
        axes.set_ylim(0, 109)
        axes.set_xlim(left=0.9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
