"""Values and engine words as a person reads them in a terminal; absent is a dash, never 0.

number(2.3456) "2.346"      steps(41210) "41,210"      ago(75) "75 s ago"
incident_lines(incident, names)                one incident: what it is, what was done and why
table(head, rows), wrapped(lines)              as wide as the terminal, no wider

There is no colour anywhere: words carry the meaning, and NO_COLOR has nothing to switch off.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

DASH = "-"
SHOWN = 8  # lines of what was done in an incident
LEFT_OUT = "left_out"  # see sentinel.core.incidents
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_RULES = {
    "nonfinite_params": "the parameters held NaN or inf",
    "nonfinite_loss": "the loss was NaN or inf",
    "nonfinite_grad": "the gradients were NaN or inf",
    "loss_spike": "the loss spike lasted",
    "loss_outlier": "the loss was far above its baseline",
    "grad_norm": "the gradient norm was far above its mean",
    "skip_bound": "too many steps had been skipped",
    "command": "a person ordered it",
    "trainer": "the trainer decided it",
}
_NONE: Mapping[int, int] = {}
_DONE = {
    "skip_step": "skipped",
    "rollback": "rolled back at",
    "rollback_failed": "tried to roll back and restored nothing at",
    "halt": "halted at",
}

ORDERS = {
    "pause": "pause automation",
    "resume": "resume automation",
    "skip_next": "skip the next step",
    "rollback": "roll back",
    "scale_lr": "scale the learning rate",
    "halt": "halt the run",
    "ack": "acknowledge an incident",
}
ORDER_STATES = {
    "pending": "waiting for the trainer",
    "delivered": "told the trainer, not yet obeyed",
    "restoring": "taken, the snapshot is not restored yet",
    "taken": "obeyed",
    "acknowledged": "obeyed",
    "superseded": "not carried out",
    "failed": "FAILED",
    "expired": "expired, never acted on",
}


def order_state(order: Mapping[str, Any]) -> str:
    """What became of an order, with the step and the reason."""
    said: str = ORDER_STATES.get(order["state"], text(order["state"]))
    if order["taken_step"] is not None:
        said += f" at step {steps(order['taken_step'])}"
    detail = order.get("detail")
    if not detail or order["state"] in ("pending", "delivered", "expired"):
        return said
    return f"{said}{',' if order['state'] == 'taken' else ':'} {text(detail)}"


def text(value: Any) -> str:
    """Text of others, safe in a terminal: no escape sequence gets through."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))


def number(value: Any) -> str:
    """A measured number; non-finite ones may come as words."""
    if value is None:
        return DASH
    if isinstance(value, str):
        value = _WORDS.get(value, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def steps(value: Any) -> str:
    """The number of a step."""
    return DASH if value is None else f"{value:,}" if isinstance(value, int) else text(value)


def ago(seconds: float | None) -> str:
    """How long it is."""
    if seconds is None:
        return DASH
    if seconds < 1.5:
        return "just now"
    for unit, size, most in (("s", 1, 100), ("min", 60, 90), ("h", 3600, 36)):
        if seconds < size * most:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"


def because(rule: str) -> str:
    """Why a rule acted."""
    return _RULES.get(rule, f"rule {text(rule)}" if rule else "no rule is given")


def deeds(actions: Sequence[Sequence[Any]], targets: Mapping[int, int] = _NONE) -> list[str]:
    """[[step, action, rule], ...] as sentences; skips in a row are told together.

    Args:
        targets: where rollbacks went to, by the step at which they were done.
    """
    groups: list[tuple[str, str, list[int]]] = []
    for at, action, rule in actions:
        if action == LEFT_OUT:
            groups.append((action, rule, [at]))
            continue
        if groups and groups[-1][:2] == (action, rule) and action.endswith("skip_step"):
            groups[-1][2].append(at)
        else:
            groups.append((action, rule, [at]))
    lines = []
    for action, rule, at in groups:
        if action == LEFT_OUT:
            lines.append(f"... {number(int(rule))} more up to step {steps(at[0])}, not listed")
            continue
        name = action.removeprefix("would_")
        verb = _DONE.get(name, text(name))
        if action != name:
            verb = f"only observing, would have {verb}"
        where = f"step {steps(at[0])}"
        if len(at) > 1:
            whole = at[-1] - at[0] + 1 == len(at)
            span = f"{steps(at[0])} to {steps(at[-1])}"
            where = f"steps {span}" if whole else f"{len(at)} of the steps {span}"
        if action == "rollback" and at[0] in targets:
            where += f" to step {steps(targets[at[0]])}"
        lines.append(f"{verb} {where}: {because(rule)}")
    return lines


def incident_lines(
    incident: dict[str, Any],
    names: Sequence[str] = (),
    run: str = "",
    targets: Mapping[int, int] = _NONE,
) -> list[str]:
    """One incident, as some lines; `run` puts the name that `sentinel ack` takes in front."""
    number_ = incident["number"]
    span = f"step {steps(incident['opened'])}"
    if incident["last"] != incident["opened"]:
        span = f"steps {steps(incident['opened'])} to {steps(incident['last'])}"
    head = (
        f"{text(run) + ':' if run else ''}{number_}  {incident['severity']} {incident['key']}, "
        f"{incident['state']}, {span}"
    )
    if incident.get("resolved") is not None:
        head += f", over at {steps(incident['resolved'])}"
    elif incident.get("latched"):
        head += ", waits for `sentinel ack`"
    if incident.get("acknowledged_by"):
        head += f", acknowledged by {text(incident['acknowledged_by'])}"
    if incident.get("silenced"):
        head += ", silenced"
    lines = [head, f"    {text(incident['summary'])}"]
    layers = [names[i] if i < len(names) else f"layer {i}" for i in incident.get("layers") or ()]
    if layers:
        more = f" and {len(layers) - 6} more" if len(layers) > 6 else ""
        what = "first out of its own band" if incident["key"] == "instability" else "layers"
        lines.append(f"    {what}: {', '.join(map(text, layers[:6]))}{more}")
    done = deeds(incident.get("actions") or (), targets)
    if len(done) > SHOWN:  # how it began, and the newest
        left = f"... {len(done) - SHOWN} lines left out: --json has them"
        done = [done[0], left, *done[1 - SHOWN :]]
    return lines + [f"    {line}" for line in done]


def width() -> int | None:
    """Columns of the terminal; None where the output goes somewhere else, or nothing is known."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given) > 0:
        return int(given)
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def wrapped(lines: Sequence[str]) -> list[str]:
    """Lines that fit the terminal: what does not goes on below, a little further in."""
    most = width()
    if most is None:
        return list(lines)
    found: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        found += textwrap.wrap(
            line,
            max(most, len(indent) + 20),
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as they need to be; those in `right` are numbers.

    Where the terminal is too narrow for that, a few lines for each row instead.
    """
    all_ = [head, *rows]
    widths = [max(len(row[i]) for row in all_) for i in range(len(head))]
    most = width()
    last = max(len(head[-1]), 12)  # the last column may go on below
    if most is not None and sum(widths[:-1]) + 2 * (len(head) - 1) + last > most:
        return "\n".join(wrapped([line for row in rows for line in _card(head, row)]))
    lines = []
    for row in all_:
        cells = [
            f"{cell:>{width}}" if i in right else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _card(head: Sequence[str], row: Sequence[str]) -> list[str]:
    """A row below each other: its first cell, then the others with their names."""
    named = zip(head[1:], row[1:], strict=True)
    said = [f"{name} {cell}".strip() for name, cell in named if cell not in ("", DASH)]
    return [row[0], f"    {', '.join(said)}"]
