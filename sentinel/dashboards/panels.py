"""The dashboard of one run, as data: on-call's questions, and the query for each.

    ROWS                       the rows, top to bottom, with their panels
    panels()                   all panels that something feeds, with stable ids
    ANNOTATIONS                the marks on every curve

Every query names the run by `$run` and takes the maximum over processes: when a pod is replaced,
two of them export the same run for a few minutes. Counters are shown as totals, since `rate` and
`increase` see nothing of a series that appears when it is first counted up.

A panel or query on a metric that the catalogue calls reserved is left out until something feeds it.

Units:   Grafana's unit ids; widths and heights in its grid of 24 columns.
Purity:  no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sentinel.core.catalog import PREFIX, MetricSpec, spec
from sentinel.core.policy import Policy

TOP = 8  # layers shown at once, the largest of each moment
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")

_DEFAULT = Policy()
FACTOR = _DEFAULT.grad_norm.factor
LOGIT = _DEFAULT.attention_logit.threshold
BAND = _DEFAULT.norm_band
HOT = _DEFAULT.spike.z_hot

GREEN, AMBER, RED, BLUE, GREY = "green", "orange", "red", "blue", "text"


@dataclass(frozen=True, slots=True)
class Query:
    """One curve, or one per label.

    Attributes:
        expr: PromQL with `$run`.
        legend: Grafana's legend format.
        colour: of a curve that always has the same; "" for the palette.
    """

    expr: str
    legend: str
    colour: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        id: stable: links to single panels hold it.
        kind: "timeseries", "stat" or "states" (a state timeline).
        runbook: heading in docs/operating.md that says what to do.
        lines: (value, colour) of horizontal lines.
        named: a stat that shows the name of the series, for states.
        steps: drawn as steps: a counter's total.
    """

    id: int
    title: str
    kind: str
    description: str
    queries: tuple[Query, ...]
    runbook: str = "the-dashboard"
    unit: str = "none"
    lines: tuple[tuple[float, str], ...] = ()
    log: bool = False
    named: bool = False
    steps: bool = False
    width: int = 12
    height: int = 8

    def fed(self) -> Panel | None:
        """Without the queries that nothing feeds yet; None when nothing is left."""
        kept = tuple(q for q in self.queries if not any(m.reserved for m in metrics_of(q.expr)))
        if not kept:
            return None
        return Panel(**{**{n: getattr(self, n) for n in self.__slots__}, "queries": kept})


@dataclass(frozen=True, slots=True)
class Mark:
    """Vertical marks on every curve.

    Attributes:
        expr: PromQL that has a sample where something happened; "" for annotations that the
            sidecar itself wrote into Grafana, which carry `tags`.
    """

    name: str
    colour: str
    expr: str = ""
    text: str = ""
    tags: tuple[str, ...] = ()


def metrics_of(expr: str) -> list[MetricSpec]:
    """The catalogue's entries that an expression reads; KeyError for one that is not there."""
    found = []
    for word in re.findall(rf"\b{PREFIX}\w+", expr):
        name = word.removeprefix(PREFIX)
        for part in HISTOGRAM_PARTS:
            name = name.removesuffix(part)
        found.append(spec(name))
    return found


def _one(metric: str, *, by: str = "", match: str = "") -> str:
    """The metric of this run, whichever process exports it."""
    group = f"max by ({by}) " if by else "max"
    more = f", {match}" if match else ""
    return f'{group}({spec(metric).full_name}{{run="$run"{more}}})'


def _its_sidecar(metric: str, *, p99_by: str = "") -> str:
    """A metric of the process that exports this run; of a histogram, its 99th percentile."""
    name = spec(metric).full_name
    here = f'and on (job, instance) {spec("run_info").full_name}{{run="$run"}}'
    if not p99_by:
        return f"max({name} {here})"
    each = f"max by (le, {p99_by}) (rate({name}_bucket[$__rate_interval]) {here})"
    return f"histogram_quantile(0.99, {each})"


def _top(metric: str) -> str:
    return f"topk({TOP}, {_one(metric, by='layer')})"


def _unmeasurable(metric: str) -> str:
    """1 for each layer that is nan or inf now: topk ranks a NaN last, and no curve shows it.

    A layer of -Inf was not measured: the maximum of nothing.
    """
    each = _one(metric, by="layer")
    return f"topk({TOP}, count by (layer) ({each} - {each} != 0 unless {each} == -Inf))"


def _happened(metric: str, by: str) -> str:
    """A sample in every minute in which the counter went up; no series before means 0."""
    total = _one(metric, by=by)
    series = total.removesuffix(")")
    return f"{total} > ({series} offset 1m) or 0 * {total})"


_SIDECAR = "when-it-is-slow-dead-or-wrong"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel(
                id=1,
                title="Run",
                kind="stat",
                description="running, finished, halted, or lost: no sign of life.",
                queries=(Query(f"{_one('run_state', by='state')} == 1", "{{state}}"),),
                runbook="sentineltrainerlost",
                named=True,
                width=4,
                height=4,
            ),
            Panel(
                id=2,
                title="Protection",
                kind="stat",
                description="armed: all rules work. warming: statistics are being collected, only "
                "non-finite values are acted on. blind, off: nothing will stop what goes wrong.",
                queries=(Query(f"{_one('protection', by='state')} == 1", "{{state}}"),),
                runbook="sentinelunprotected",
                named=True,
                width=4,
                height=4,
            ),
            Panel(
                id=3,
                title="Step",
                kind="stat",
                description="Newest attempted optimizer step. It does not go back in a rollback.",
                queries=(Query(_one("step"), "step"),),
                width=4,
                height=4,
            ),
            Panel(
                id=4,
                title="Last report",
                kind="stat",
                description="Age of the newest step. A run that hangs is running, and this grows.",
                queries=(
                    Query(f"time() - {_one('last_report_timestamp_seconds')}", "seconds ago"),
                ),
                runbook="sentinelstalled",
                unit="s",
                width=4,
                height=4,
            ),
            Panel(
                id=5,
                title="Last good snapshot",
                kind="stat",
                description="The step that a rollback would go back to. Empty: there is none.",
                queries=(Query(_one("last_good_snapshot_step"), "step"),),
                runbook="sentinelrollbackfailed",
                width=4,
                height=4,
            ),
            Panel(
                id=6,
                title="Incidents",
                kind="stat",
                description="By state and severity, resolved ones too.",
                queries=(Query(_one("incidents", by="state, severity"), "{{state}} {{severity}}"),),
                runbook="sentinelrollback",
                width=4,
                height=4,
            ),
            Panel(
                id=7,
                title="State and protection over time",
                kind="states",
                description="A bar while the state holds.",
                queries=(
                    Query(f"{_one('run_state', by='state')} == 1", "run {{state}}"),
                    Query(f"{_one('protection', by='state')} == 1", "protection {{state}}"),
                ),
                runbook="sentinelunprotected",
                width=24,
                height=6,
            ),
        ),
    ),
    (
        "Loss and gradient",
        (
            Panel(
                id=10,
                title="Loss",
                kind="timeseries",
                description="Mean training loss of the step over all ranks. A NaN leaves a gap: "
                "look at 'Non-finite steps'.",
                queries=(Query(_one("loss"), "loss"),),
                runbook="sentinelrollback",
                unit="suffix: nats",
            ),
            Panel(
                id=11,
                title="Loss spike score",
                kind="timeseries",
                description="How far the loss lies above its predicted value, in robust standard "
                f"deviations. Above {HOT:g} a step is hot; at the 4th hot step of an incident the "
                "run is rolled back. The window maximum keeps a one-step spike visible between "
                "two scrapes.",
                queries=(
                    Query(_one("loss_spike_score"), "score"),
                    Query(_one("loss_spike_score_window_max"), "window maximum", AMBER),
                ),
                runbook="sentinelrollback",
                unit="suffix: std",
                lines=((HOT, RED),),
            ),
            Panel(
                id=12,
                title="Gradient norm",
                kind="timeseries",
                description=f"Before clipping. Healthy is 1 to {BAND.high:g}, or below; above "
                f"{BAND.alarm:g} a scale in the architecture is wrong. Above {FACTOR:g} times the "
                "baseline the step is skipped. No baseline: the rule is not armed yet.",
                queries=(
                    Query(_one("grad_norm"), "norm"),
                    Query(_one("grad_norm_window_max"), "window maximum", AMBER),
                    Query(_one("grad_norm_baseline"), "baseline", GREEN),
                    Query(
                        f"{FACTOR:g} * {_one('grad_norm_baseline')}",
                        f"{FACTOR:g} x baseline: skip",
                        RED,
                    ),
                ),
                runbook="sentinelnonfinite",
                lines=((BAND.alarm, AMBER),),
                log=True,
            ),
            Panel(
                id=13,
                title="Learning rate",
                kind="timeseries",
                description="As scheduled, and as applied: after a rollback sentinel cuts it and "
                "warms it up again.",
                queries=(
                    Query(_one("learning_rate"), "scheduled"),
                    Query(
                        f"{_one('learning_rate')} * {_one('learning_rate_factor')}",
                        "applied",
                        AMBER,
                    ),
                ),
                runbook="sentinelrollback",
                unit="sci",
            ),
            Panel(
                id=14,
                title="Clip pressure",
                kind="timeseries",
                description="Share of steps that were clipped. Rare is healthy: on for many steps "
                "in a row, the effective step is not what the optimizer thinks.",
                queries=(Query(_one("clipped_step_ratio"), "clipped"),),
                runbook="clip_pressure",
                unit="percentunit",
            ),
            Panel(
                id=15,
                title="Loss scale",
                kind="timeseries",
                description="Of the gradient scaler; only with fp16. Collapsing: the first thing "
                "to look at when gradients explode.",
                queries=(Query(_one("loss_scale"), "scale"),),
                runbook="loss_scale",
                log=True,
            ),
        ),
    ),
    (
        "What sentinel did",
        (
            Panel(
                id=20,
                title="Skipped steps",
                kind="timeseries",
                description="Total by rule. A skipped step moves no parameter and no optimizer "
                "state.",
                queries=(Query(_one("skipped_steps_total", by="rule"), "{{rule}}"),),
                runbook="sentinelnonfinite",
                steps=True,
                width=8,
            ),
            Panel(
                id=21,
                title="Rollbacks",
                kind="timeseries",
                description="Total by rule and outcome. failed, none: the damage is still there.",
                queries=(
                    Query(_one("rollbacks_total", by="rule, outcome"), "{{rule}} {{outcome}}"),
                    Query(_one("attempt"), "attempt", GREY),
                ),
                runbook="sentinelrollback",
                steps=True,
                width=8,
            ),
            Panel(
                id=22,
                title="Non-finite steps",
                kind="timeseries",
                description="Total of steps with nan or inf, by signal.",
                queries=(Query(_one("nonfinite_steps_total", by="signal"), "{{signal}}"),),
                runbook="sentinelnonfinite",
                steps=True,
                width=8,
            ),
            Panel(
                id=23,
                title="Spike steps and lost steps",
                kind="timeseries",
                description="Hot steps, and steps whose update is not in the weights any more.",
                queries=(
                    Query(_one("loss_spike_steps_total"), "spike steps"),
                    Query(_one("lost_steps_total"), "lost steps", AMBER),
                ),
                runbook="sentinelrollback",
                steps=True,
                width=12,
            ),
            Panel(
                id=24,
                title="Flags",
                kind="timeseries",
                description="Advice that changes nothing by itself; total by flag.",
                queries=(Query(_one("flags_total", by="flag"), "{{flag}}"),),
                runbook="flags",
                steps=True,
                width=12,
            ),
        ),
    ),
    (
        "Layers",
        (
            Panel(
                id=30,
                title=f"Gradient norm, top {TOP} layers",
                kind="timeseries",
                description="Which layer grew first? One far above the others: its scale or "
                "learning rate. A layer that is nan or inf is named in the legend.",
                queries=(
                    Query(_top("layer_grad_norm"), "{{layer}}"),
                    Query(_unmeasurable("layer_grad_norm"), "not finite: {{layer}}", RED),
                ),
                runbook="sentinelnonfinite",
                log=True,
            ),
            Panel(
                id=31,
                title=f"Attention max logit, top {TOP} layers",
                kind="timeseries",
                description=f"Largest score before the softmax. Above {LOGIT:g} the layer is "
                "flagged: add QK-Norm, or lower the initial variance.",
                queries=(
                    Query(_top("layer_attention_max_logit"), "{{layer}}"),
                    Query(_one("attention_max_logit_window_max"), "window maximum", AMBER),
                ),
                runbook="sentinelqknorm",
                lines=((LOGIT, RED),),
            ),
            Panel(
                id=32,
                title=f"Update-to-weight ratio, top {TOP} layers",
                kind="timeseries",
                description="Healthy is about 1e-3 and alike across layers.",
                queries=(Query(_top("layer_update_ratio"), "{{layer}}"),),
                runbook="update_ratio",
                unit="sci",
                lines=((1e-3, GREEN),),
                log=True,
            ),
            Panel(
                id=33,
                title=f"Activation RMS, top {TOP} layers",
                kind="timeseries",
                description="Distinct and stable is healthy; drift with depth asks for residual "
                "scaling or a norm.",
                queries=(Query(_top("layer_activation_rms"), "{{layer}}"),),
                runbook="depth",
                log=True,
            ),
        ),
    ),
    (
        "Machine",
        (
            Panel(
                id=40,
                title="Device memory",
                kind="timeseries",
                description="By kind. Keep 15 to 20 % free for peaks of communication.",
                queries=(Query(_one("memory_bytes", by="kind"), "{{kind}}"),),
                runbook="headroom",
                unit="bytes",
            ),
            Panel(
                id=41,
                title="Throughput",
                kind="timeseries",
                description="A drop: recomputation, gradient synchronisation, interconnect.",
                queries=(Query(_one("tokens_per_second"), "tokens per second"),),
                runbook="throughput",
                unit="suffix: tok/s",
            ),
        ),
    ),
    (
        "Sidecar",
        (
            Panel(
                id=50,
                title="Time for one decision",
                kind="timeseries",
                description="99th percentile in the sidecar, and the longest wait of the trainer. "
                "The trainer waits 50 ms at most, then its own decision stands.",
                queries=(
                    Query(
                        "histogram_quantile(0.99, sum by (le) "
                        f"(rate({spec('decision_duration_seconds').full_name}_bucket"
                        '{run="$run"}[$__rate_interval])))',
                        "p99 in the sidecar",
                    ),
                    Query(_one("decision_longest_wait_seconds"), "longest wait", AMBER),
                ),
                runbook=_SIDECAR,
                unit="s",
            ),
            Panel(
                id=51,
                title="Misses, drops, errors",
                kind="timeseries",
                description="Totals. misses: the trainer asked in vain. mismatches: the answer was "
                "not its own. dropped: holes in the record. All of them flat is healthy.",
                queries=(
                    Query(_one("decision_misses_total", by="reason"), "missed: {{reason}}"),
                    Query(_one("decision_mismatches_total"), "mismatches"),
                    Query(_one("reports_dropped_total", by="reason"), "dropped: {{reason}}"),
                    Query(_one("reports_late_total"), "late"),
                    Query(_one("report_holes"), "holes in the record"),
                    Query(_one("second_writers_refused"), "second writers refused"),
                    Query(_one("internal_errors_total", by="where"), "error: {{where}}"),
                ),
                runbook=_SIDECAR,
                steps=True,
            ),
            Panel(
                id=52,
                title="Is the sidecar quick?",
                kind="timeseries",
                description="Of the process that exports this run, for all its runs: how late its "
                "event loop was at worst, and how long answers take.",
                queries=(
                    Query(_its_sidecar("sidecar_loop_lag_window_max_seconds"), "loop lag", AMBER),
                    Query(
                        _its_sidecar("sidecar_request_duration_seconds", p99_by="route"),
                        "p99 {{route}}",
                    ),
                ),
                runbook=_SIDECAR,
                unit="s",
            ),
            Panel(
                id=53,
                title="Does the sidecar keep its record?",
                kind="timeseries",
                description="trouble 1: a disk or the database fails, and trainers keep what it "
                "could not. All flat at 0 is healthy.",
                queries=(
                    Query(_its_sidecar("sidecar_store_trouble"), "trouble", RED),
                    Query(_its_sidecar("sidecar_database_queue"), "waiting for the database"),
                    Query(_its_sidecar("sidecar_database_errors_total"), "database errors"),
                    Query(_its_sidecar("sidecar_database_lost_total"), "writes given up"),
                    Query(_its_sidecar("sidecar_lost_records_total"), "reports that no disk took"),
                ),
                runbook="sentinelrecordtrouble",
                steps=True,
            ),
        ),
    ),
)

ANNOTATIONS: tuple[Mark, ...] = (
    Mark(
        "Rollbacks",
        RED,
        expr=_happened("rollbacks_total", "rule, outcome"),
        text="rollback: {{rule}} {{outcome}}",
    ),
    Mark("Skips", AMBER, expr=_happened("skipped_steps_total", "rule"), text="skipped: {{rule}}"),
    Mark("Reports of the sidecar", BLUE, tags=("sentinel", "run:$run")),
)


def rows() -> Iterator[tuple[str, tuple[Panel, ...]]]:
    """Rows with what is fed; an empty row is left out."""
    for title, panels_ in ROWS:
        kept = tuple(p for p in (panel.fed() for panel in panels_) if p is not None)
        if kept:
            yield title, kept


def panels() -> list[Panel]:
    """All panels that something feeds."""
    return [panel for _, kept in rows() for panel in kept]
