"""The alert rules, as data: when shall somebody be told, and what is said?

    ALERTS                                    all of them, in the order of docs/operating.md
    prometheus_groups(runbooks)               as a Prometheus rules file holds them
    grafana_group(folder, datasource, ...)    as PUT /v1/provisioning/folder/../rule-groups/..
    grafana_file(datasource, ...)             as Grafana reads it from provisioning/alerting/

One list of expressions serves both, so that they cannot disagree. Three traps are met here:

- A NaN never satisfies `>`. The rules for non-finite values look at counters.
- A counter with labels has no series until it is first counted up, and `increase` sees nothing of
  a series that appears at 1. `_counted_up` compares with the value of 15 minutes ago, and no
  value then means 0. It looks back another hour for it, so that a sidecar which was away for
  some minutes, or runs in a new pod, brings nothing back that was told before.
- Series vanish together with the process that exports them. "Nothing is known any more" is asked
  of what was last known, and of the newest process only: see SentinelSilent.

Every expression is above 0 where it has a sample, and has none where all is well: Grafana's
threshold is `> 0`, and its "no data" means OK.

Units:   durations as Prometheus writes them.
Purity:  no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sentinel.core.catalog import spec

GROUP = "sentinel"
INTERVAL_S = 15
FOLDER = "sentinel"  # uid and title of the folder in Grafana
RUNBOOKS = "https://sentinel.example/operating"  # --runbooks says where docs/operating.md is read
DATASOURCE = "prometheus"  # uid of the data source in Grafana
WINDOW = "15m"  # for how long an event is shown as an alert
MEMORY = "1h"  # how far back the last known value may lie


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule.

    Attributes:
        name: of the alert, and the heading of its runbook in docs/operating.md.
        metrics: catalogue names that `expr` reads; unknown ones are a KeyError here.
        hold: how long it must be true, "0s": at once.
        severity: critical wakes somebody, warning is for the day, info is advice.
    """

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    metrics: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.metrics:
            if spec(name).reserved:
                raise ValueError(f"{self.name} reads {name}, which nothing feeds yet")

    def runbook(self, base: str) -> str:
        """Where its runbook is read."""
        return f"{base}#{self.name.lower()}"

    def annotations(self, base: str) -> dict[str, str]:
        """What Prometheus and Grafana pass on with it."""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": self.runbook(base),
        }


def _counted_up(metric: str, *by: str, match: str = "") -> str:
    """The counter has gone up within WINDOW, by whatever: see the module docstring."""
    series = spec(metric).full_name + match
    group = f"max by ({', '.join(('run', *by))})"
    now = f"{group} ({series})"
    before = f"{group} (last_over_time({series}[{MEMORY}] offset {WINDOW}))"
    return f"{group} (increase({series}[{WINDOW}])) > 0\nor\n{now} > ({before} or 0 * {now})"


_STATE = spec("run_state").full_name
_REPORT = spec("last_report_timestamp_seconds").full_name
_RUNNING = f'max by (run) ({_STATE}{{state="running"}}) == 1'
_INSTANCE = "max by (run, instance)"

# Half an hour, or 50 of the run's own steps when those are long; its usual interval is absent until
# two steps have come. Not before the first step: compiling takes what it takes.
_STALLED = f"""time() - max by (run) ({_REPORT})
  > clamp_min(50 * max by (run) ({spec("report_interval_seconds").full_name})
    or 0 * max by (run) ({_REPORT}), 1800)
and on (run) {_RUNNING}
and on (run) max by (run) ({spec("step").full_name}) >= 0"""

_UNGUARDED = f"""max by (run, state) ({spec("protection").full_name}{{state=~"off|blind"}}) == 1
and on (run) {_RUNNING}
and on (run) max by (run) ({spec("step").full_name}) >= 0
unless on (run) {spec("run_info").full_name}{{mode="observe"}}"""

# Of all processes that ever exported this run, the newest was last seen running, and none exports
# it now. The older ones have to stay out: a run that crashed, was started again and then ended
# well is not missing.
_SILENT = f"""(
  max by (run) (
    {_INSTANCE} (last_over_time({_STATE}{{state="running"}}[{MEMORY}]))
    * {_INSTANCE} (last_over_time({_REPORT}[{MEMORY}]))
  )
  == max by (run) (last_over_time({_REPORT}[{MEMORY}]))
)
unless on (run) max by (run) ({_STATE})"""

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="SentinelRollback",
        expr=_counted_up("rollbacks_total", "rule", match='{outcome="restored"}'),
        hold="0s",
        severity="warning",
        summary="Run {{ .Labels.run }} was rolled back (rule {{ .Labels.rule }})",
        description="Sentinel restored a healthy snapshot; training goes on with later data. A "
        "rule's rollback also cut the learning rate; one that a person ordered (rule command) did "
        "not.",
        metrics=("rollbacks_total",),
    ),
    Alert(
        name="SentinelRollbackFailed",
        expr=_counted_up("rollbacks_total", "rule", "outcome", match='{outcome!="restored"}'),
        hold="0s",
        severity="critical",
        summary="Run {{ .Labels.run }} could not be rolled back ({{ .Labels.outcome }})",
        description="Rule {{ .Labels.rule }} (command: a person) asked for a rollback and none was "
        "done: no usable "
        "snapshot, or restoring it failed. The step was skipped and the learning rate cut; what is "
        "wrong with the weights is still in them.",
        metrics=("rollbacks_total",),
    ),
    Alert(
        name="SentinelNonFinite",
        expr=_counted_up("nonfinite_steps_total", "signal", match='{signal!="scaler"}'),
        hold="0s",
        severity="warning",
        summary="Run {{ .Labels.run }} has non-finite values ({{ .Labels.signal }})",
        description="A step had nan or inf in its {{ .Labels.signal }}. While the run is guarded "
        "such a step is skipped; lasting ones are rolled back. Overflows that a gradient scaler "
        "dealt with by itself are not meant.",
        metrics=("nonfinite_steps_total",),
    ),
    Alert(
        name="SentinelTrainerLost",
        expr=f'max by (run) ({_STATE}{{state="lost"}}) == 1\nunless on (run) {_RUNNING}',
        hold="0s",
        severity="critical",
        summary="Run {{ .Labels.run }} is lost",
        description="Its trainer has given the sidecar no sign of life for longer than it should "
        "and has not said goodbye.",
        metrics=("run_state",),
    ),
    Alert(
        name="SentinelStalled",
        expr=_STALLED,
        hold="0s",
        severity="warning",
        summary="Run {{ .Labels.run }} makes no step any more",
        description="It is not known to have ended, but no optimizer step has come for half an "
        "hour and for 50 of its usual intervals: it hangs, or evaluates for very long. A run "
        "without a sidecar, seen by its .prom file alone, may also be dead.",
        metrics=("last_report_timestamp_seconds", "report_interval_seconds", "run_state", "step"),
    ),
    Alert(
        name="SentinelUnprotected",
        expr=_UNGUARDED,
        hold="2m",
        severity="critical",
        summary="Run {{ .Labels.run }} trains without protection ({{ .Labels.state }})",
        description="off: paused by a person, out of rollback budget, or detached. blind: nothing "
        "useful is measured. Nothing will stop or undo what goes wrong now.",
        metrics=("protection", "run_state", "step", "run_info"),
    ),
    Alert(
        name="SentinelSilent",
        expr=_SILENT,
        hold="2m",
        severity="critical",
        summary="Nothing is known of run {{ .Labels.run }} any more",
        description="It was running when it was last seen, and no sidecar exports it now: the "
        "sidecar is down or cannot be scraped, or its pod is gone together with the trainer.",
        metrics=("run_state", "last_report_timestamp_seconds"),
    ),
    Alert(
        name="SentinelRecordTrouble",
        expr=f"max by (instance) ({spec('sidecar_store_trouble').full_name}) == 1",
        hold="5m",
        severity="warning",
        summary="The sidecar at {{ .Labels.instance }} cannot keep its record",
        description="A disk or the database fails. Runs are guarded as before; their trainers keep "
        "what could not be written, up to their buffer.",
        metrics=("sidecar_store_trouble",),
    ),
    Alert(
        name="SentinelSnapshotDamaged",
        expr="max by (run) "
        f'({spec("sidecar_snapshots_checked").full_name}{{result="damaged"}}) > 0',
        hold="0s",
        severity="warning",
        summary="A snapshot of run {{ .Labels.run }} is damaged on disk",
        description="The sidecar has read it again, and its checksums do not fit any more. The run "
        "will not go back to it: it takes the next older one.",
        metrics=("sidecar_snapshots_checked",),
    ),
    Alert(
        name="SentinelQkNorm",
        expr=_counted_up("flags_total", "flag", match='{flag="attention_logit"}'),
        hold="0s",
        severity="info",
        summary="Run {{ .Labels.run }}: attention logits above the threshold, add QK-Norm",
        description="Advice, nothing was done: the softmax saturates and passes no gradient. "
        "The layers are on the dashboard and in `sentinel status`.",
        metrics=("flags_total",),
    ),
)


def alert(name: str) -> Alert:
    """The rule of that name; KeyError if there is none."""
    for one in ALERTS:
        if one.name == name:
            return one
    raise KeyError(name)


def prometheus_groups(runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """A Prometheus rules file, and the spec of a PrometheusRule."""
    rules = []
    for one in ALERTS:
        rule: dict[str, Any] = {"alert": one.name, "expr": one.expr}
        if one.hold != "0s":
            rule["for"] = one.hold
        rule["labels"] = {"severity": one.severity, **one.labels}
        rule["annotations"] = one.annotations(runbooks)
        rules.append(rule)
    return {"groups": [{"name": GROUP, "interval": f"{INTERVAL_S}s", "rules": rules}]}


def _grafana_rule(one: Alert, datasource: str, runbooks: str) -> dict[str, Any]:
    """What the API and the file have in common."""
    query = {
        "refId": "A",
        "datasource": {"type": "prometheus", "uid": datasource},
        "expr": one.expr,
        "instant": True,
        "range": False,
    }
    threshold = {
        "refId": "B",
        "datasource": {"type": "__expr__", "uid": "__expr__"},
        "type": "threshold",
        "expression": "A",
        "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
    }
    span = {"from": 600, "to": 0}
    return {
        "uid": one.name.lower(),
        "title": one.name,
        "condition": "B",
        "data": [
            {
                "refId": "A",
                "datasourceUid": datasource,
                "relativeTimeRange": span,
                "model": query,
            },
            {
                "refId": "B",
                "datasourceUid": "__expr__",
                "relativeTimeRange": span,
                "model": threshold,
            },
        ],
        "for": one.hold,
        "noDataState": "OK",  # no sample is the healthy case
        "execErrState": "Error",  # a rule that cannot be asked must not look healthy
        "labels": {"severity": one.severity, **one.labels},
        "annotations": one.annotations(runbooks),
        "isPaused": False,
    }


def grafana_group(
    folder: str = FOLDER, datasource: str = DATASOURCE, runbooks: str = RUNBOOKS
) -> dict[str, Any]:
    """The rule group as the provisioning API takes it.

    Args:
        folder: uid of the folder.
        datasource: uid of the Prometheus data source.
    """
    rules = [
        {
            **_grafana_rule(one, datasource, runbooks),
            "orgID": 1,
            "folderUID": folder,
            "ruleGroup": GROUP,
        }
        for one in ALERTS
    ]
    return {"title": GROUP, "folderUid": folder, "interval": INTERVAL_S, "rules": rules}


def grafana_file(datasource: str = DATASOURCE, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """The rule group as a file in Grafana's provisioning/alerting folder."""
    rules = [_grafana_rule(one, datasource, runbooks) for one in ALERTS]
    group = {
        "orgId": 1,
        "name": GROUP,
        "folder": FOLDER,
        "interval": f"{INTERVAL_S}s",
        "rules": rules,
    }
    return {"apiVersion": 1, "groups": [group]}
