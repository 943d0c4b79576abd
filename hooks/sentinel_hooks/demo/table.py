"""What came out: the demo's result as a value, as JSON (format: schema 1) and as a table.

    report = build(...)          plain dicts and lists, ready for wire.codec.to_json
    lines  = draw(report)        the same for people

The share of the gap that was recovered is (unprotected - protected) / (unprotected - fault-free).
A model whose loss is NaN knows nothing: it counts as guessing, ln 256 = 5.55 nats a byte.

Units:   loss [nats/byte] on held-out files; steps.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sentinel_hooks.demo.corpus import VOCABULARY
from sentinel_hooks.demo.faults import FAULTS
from sentinel_hooks.demo.runner import Run
from sentinel_hooks.demo.sidecar import total

SCHEMA = 1
GUESSING = math.log(VOCABULARY)
_HEAD = (
    "fault",
    "at step",
    "noticed",
    "unprotected",
    "protected",
    "no fault",
    "recovered",
    "lost steps",
)
_RULES = {
    "nonfinite_grad": "gradient not finite",
    "nonfinite_loss": "loss not finite",
    "nonfinite_params": "weights not finite",
    "grad_norm": "gradient norm far above its mean",
    "loss_outlier": "loss far above its baseline",
    "loss_spike": "loss spike lasts",
    "skip_bound": "too many skips",
}


def machine() -> str:
    """The machine in words; no names."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} CPU cores ({platform.machine()}), CPU only, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"
    )


def recovered(unprotected: float, protected: float, fault_free: float) -> float | None:
    """Share of the gap that protection closed; None when the fault cost nothing."""
    lost = GUESSING if not math.isfinite(unprotected) else unprotected
    kept = GUESSING if not math.isfinite(protected) else protected
    gap = lost - fault_free
    return (lost - kept) / gap if gap > 0 else None


def build(
    runs: Sequence[Run], *, measured_at: str, wall_s: float, sidecar: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of finished runs; the fault-free unprotected run is among them."""
    of = {(run.settings.fault, run.settings.protected): run for run in runs}
    free = _loss(of["none", False])
    first = runs[0].settings
    worlds = [_world(of[key, False], of[key, True], free) for key in FAULTS if (key, True) in of]
    decided: dict[str, int] = {}
    for run in runs:
        assert run.result is not None
        for source, count in run.result.get("decided_by", {}).items():
            decided[source] = decided.get(source, 0) + count
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "measured_at": measured_at,
        "wall_s": round(wall_s, 1),
        "seed": first.seed,
        "steps": first.steps,
        "parameters": runs[0].result["parameters"] if runs[0].result else 0,
        "tokens_per_step": first.shape.rows * first.shape.length,
        "fault_free": {"validation_loss": free},
        "worlds": worlds,
        "decided_by": decided,
        "sidecar": dict(sidecar),
    }


def _world(unprotected: Run, protected: Run, free: float) -> dict[str, Any]:
    result = protected.result
    assert result is not None
    key = unprotected.settings.fault
    harmless = key == "none"
    return {
        "fault": FAULTS[key].label,
        "key": key,
        "fault_step": None if harmless else unprotected.settings.fault_step,
        "unprotected": {"validation_loss": _loss(unprotected)},
        "protected": {
            "validation_loss": _loss(protected),
            "noticed_after_steps": result["noticed_after_steps"],
            "actions": result["actions"],
            "lost_steps": result["lost_steps"],
            "lowest_lr_factor": result["lowest_lr_factor"],
            "false_alarms": result["false_alarms"],
        },
        "recovered": None if harmless else recovered(_loss(unprotected), _loss(protected), free),
    }


def _loss(run: Run) -> float:
    assert run.result is not None
    return float(run.result["validation_loss"])


# ---------------------------------------------------------------- for people


def draw(report: Mapping[str, Any]) -> list[str]:
    """The report as lines of text."""
    rows = [_HEAD, *(_row(world, report) for world in report["worlds"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    head, *rest = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    table = [head, "-" * len(head)]
    for line, world in zip(rest, report["worlds"], strict=True):
        protected = world["protected"]
        done = actions_in_words(protected["actions"], protected["lowest_lr_factor"])
        table += [line, f"    {done}"]
    run = (
        f"{report['parameters'] / 1e6:.2f} million parameters, {report['steps']} steps of "
        f"{report['tokens_per_step']} tokens, seed {report['seed']}"
    )
    return [
        f"validation loss [nats/byte] on held-out files; {run}",
        f"{report['machine']}; {report['measured_at']}; took {report['wall_s']:.0f} s",
        "",
        *table,
        "",
        *_sidecar(report),
    ]


def _row(world: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    protected = world["protected"]
    noticed, share = protected["noticed_after_steps"], world["recovered"]
    return (
        world["fault"],
        "-" if world["fault_step"] is None else str(world["fault_step"]),
        "-" if noticed is None else f"+{noticed}",
        f"{world['unprotected']['validation_loss']:.3f}",
        f"{protected['validation_loss']:.3f}",
        f"{report['fault_free']['validation_loss']:.3f}",
        "-" if share is None else f"{100 * share:.0f} %",
        str(protected["lost_steps"]),
    )


def actions_in_words(actions: Sequence[Mapping[str, Any]], lowest_lr_factor: float) -> str:
    """What was done, in order; skips in a row for the same reason are told together."""
    if not actions:
        return "nothing was done"
    words: list[str] = []
    for rule, group in itertools.groupby(actions, lambda a: (a["action"], a["rule"])):
        same = list(group)
        why = _RULES.get(rule[1], rule[1])
        if rule[0] == "skip_step":
            words.append(f"skipped {len(same)} {'batch' if len(same) == 1 else 'batches'} ({why})")
        elif rule[0] == "rollback":
            words.append(f"rolled back to step {same[-1].get('target')} ({why})")
        else:
            words.append(f"{rule[0]} ({why})")
    if lowest_lr_factor < 1.0:
        words.append(f"learning rate x{lowest_lr_factor:g}, then re-warmed")
    return ", ".join(words)


def _sidecar(report: Mapping[str, Any]) -> list[str]:
    sidecar = report["sidecar"]
    if not sidecar["used"]:
        return [f"no sidecar: {sidecar['why_not']}; the engine in the trainer decided"]
    count = sum(report["decided_by"].values())
    shares = ", ".join(
        f"{100 * number / count:.1f} % by the {source}'s engine"
        for source, number in sorted(report["decided_by"].items())
    )
    return [
        "the sidecar's /metrics, all runs together, before -> after:",
        *(
            f"  {name:<44} {before:>6g} -> {after:g}"
            for name, (before, after) in sidecar["metrics"].items()
        ),
        f"decisions carried out: {shares}",
    ]


# (metric, labels): counters that the demo moves, in the order in which they are shown.
WATCHED: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("sentinel_steps_total", {}),
    ("sentinel_decisions_total", {"source": "sidecar"}),
    ("sentinel_decisions_total", {"source": "trainer"}),
    ("sentinel_decision_misses_total", {}),
    ("sentinel_loss_spike_steps_total", {}),
    ("sentinel_nonfinite_steps_total", {}),
    ("sentinel_skipped_steps_total", {}),
    ("sentinel_rollbacks_total", {}),
    ("sentinel_lost_steps_total", {}),
)


def moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, list[float]]:
    """What /metrics said first and last, summed over runs."""
    return {
        name + _labels(labels): [total(scrape, name, **labels) for scrape in (before, after)]
        for name, labels in WATCHED
    }


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{{{inside}}}" if inside else ""
