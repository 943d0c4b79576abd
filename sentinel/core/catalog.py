"""The metric catalogue: every metric that sentinel exports, as data.

    CATALOG                 all of them, in the order in which they are exported and documented
    spec("grad_norm")       one, by its name without the prefix

The exporter walks this list, docs/operating.md is checked against it, and dashboards and alert
rules are to be generated from it. `run` is on every metric but build_info; `step` is never a label
(unbounded), `layer` is bounded by the layer table. A NaN never satisfies `>`: alerts on
non-finite values use the counters.

Units:   base units, as Prometheus wants them; "" is dimensionless or stated in the help.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "sentinel_"


class Kind(StrEnum):
    """Prometheus's metric types. An info metric is a gauge that is 1, a state set one gauge per
    state of which exactly one is 1."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: without the prefix; counters end in _total.
        labels: besides `run`.
        buckets: upper bounds of a histogram, without +Inf.
        reserved: named here, but nothing feeds it yet.
        per_run: it carries the label `run`.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    reserved: bool = False
    per_run: bool = True

    @property
    def full_name(self) -> str:
        """The name as Prometheus sees it."""
        return PREFIX + self.name


PROTECTIONS = ("armed", "warming", "blind", "off")
RUN_STATES = ("running", "finished", "halted", "lost")
DURATIONS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DECISIONS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)

_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

CATALOG: tuple[MetricSpec, ...] = (
    MetricSpec("build_info", _G, "Version of this sidecar; always 1.", ("version",), per_run=False),
    MetricSpec(
        "run_info",
        _G,
        "What this run is; always 1.",
        ("policy", "mode", "engine_version", "incarnation"),
    ),
    MetricSpec("run_state", _G, "1 for the state that the run is in.", ("state",)),
    MetricSpec(
        "protection",
        _G,
        "1 for how well the run is guarded: armed, warming, blind, off.",
        ("state",),
    ),
    MetricSpec("automation_paused", _G, "1 while a person has paused automation."),
    MetricSpec("step", _G, "Newest attempted optimizer step, 0-based."),
    MetricSpec("attempt", _G, "0, then one more with every restored snapshot."),
    MetricSpec(
        "last_report_timestamp_seconds", _G, "Unix time of the newest report.", unit="seconds"
    ),
    MetricSpec(
        "report_interval_seconds", _G, "Usual time between two reports of this run.", unit="seconds"
    ),
    MetricSpec("report_holes", _G, "Reports that are missing between the first and the newest."),
    MetricSpec(
        "second_writers_refused", _G, "Live processes with this run's id that were turned away."
    ),
    MetricSpec("loss", _G, "Mean training loss of the newest step [nats per token]."),
    MetricSpec(
        "loss_spike_score", _G, "Loss above its predicted value [robust standard deviations]."
    ),
    MetricSpec(
        "loss_spike_score_window_max", _G, "Largest loss_spike_score of the last 1 to 2 minutes."
    ),
    MetricSpec("learning_rate", _G, "Learning rate as the user's schedule set it, before any cut."),
    MetricSpec("learning_rate_factor", _G, "What sentinel multiplies the learning rate by."),
    MetricSpec("loss_scale", _G, "Scale of the gradient scaler."),
    MetricSpec("grad_norm", _G, "Global L2 gradient norm of the newest step, before clipping."),
    MetricSpec(
        "grad_norm_baseline", _G, "Mean of the accepted gradient norms; absent until armed."
    ),
    MetricSpec("grad_norm_window_max", _G, "Largest grad_norm of the last 1 to 2 minutes."),
    MetricSpec(
        "layer_grad_norm", _G, "L2 gradient norm of one layer, before clipping.", ("layer",)
    ),
    MetricSpec(
        "layer_update_ratio", _G, "Norm of the update over norm of the weights.", ("layer",)
    ),
    MetricSpec(
        "layer_attention_max_logit",
        _G,
        "Largest scaled attention score before the softmax.",
        ("layer",),
    ),
    MetricSpec("layer_activation_rms", _G, "RMS of the layer's output.", ("layer",)),
    MetricSpec(
        "layer_quantile",
        _G,
        "Quantiles of a signal over all finite layers; of runs with more layers than series.",
        ("signal", "q"),
    ),
    MetricSpec(
        "attention_max_logit_window_max",
        _G,
        "Largest attention score of any layer in the last 1 to 2 minutes.",
    ),
    MetricSpec(
        "layers_left_out", _G, "Layers without series of their own, above the cap on series."
    ),
    MetricSpec("memory_bytes", _G, "Device memory by kind.", ("kind",), unit="bytes"),
    MetricSpec("tokens_per_second", _G, "Training throughput."),
    MetricSpec("clipped_step_ratio", _G, "Share of steps that were clipped."),
    MetricSpec("self_check_failures", _G, "What the self-check of the first steps found missing."),
    MetricSpec(
        "last_good_snapshot_step", _G, "Step of the newest healthy snapshot; absent without one."
    ),
    MetricSpec("incidents", _G, "Incidents by state and severity.", ("state", "severity")),
    MetricSpec("steps_total", _C, "Steps that were attempted."),
    MetricSpec("skipped_steps_total", _C, "Steps that sentinel skipped, by rule.", ("rule",)),
    MetricSpec(
        "rollbacks_total",
        _C,
        "Rollbacks that were due, by rule (command: ordered) and what became of them: restored, "
        "failed or none (no usable snapshot).",
        ("rule", "outcome"),
    ),
    MetricSpec(
        "would_act_total",
        _C,
        "Actions that an acting policy would have taken, while observing.",
        ("action", "rule"),
    ),
    MetricSpec("lost_steps_total", _C, "Steps whose update is not in the weights any more."),
    MetricSpec(
        "nonfinite_steps_total",
        _C,
        "Steps on which a signal was nan or inf; scaler: overflows that the scaler dropped.",
        ("signal",),
    ),
    MetricSpec("loss_spike_steps_total", _C, "Steps on which the loss was hot."),
    MetricSpec(
        "flags_total", _C, "Flags raised: advice that changes nothing by itself.", ("flag",)
    ),
    MetricSpec("decisions_total", _C, "Executed decisions, by whose they were.", ("source",)),
    MetricSpec(
        "decision_misses_total",
        _C,
        "Steps on which the trainer asked the sidecar in vain.",
        ("reason",),
    ),
    MetricSpec(
        "decision_mismatches_total", _C, "Answers that differed from the trainer's own decision."
    ),
    MetricSpec(
        "reports_dropped_total", _C, "Reports that never arrived: holes in the record.", ("reason",)
    ),
    MetricSpec("reports_late_total", _C, "Reports recorded after their step was over."),
    MetricSpec("state_handovers_total", _C, "Times the trainer handed its state over."),
    MetricSpec("internal_errors_total", _C, "Errors of sentinel's own, caught.", ("where",)),
    MetricSpec(
        "decision_longest_wait_seconds",
        _G,
        "Longest time that one step of the trainer waited for the sidecar.",
        unit="seconds",
    ),
    MetricSpec(
        "decision_duration_seconds",
        _H,
        "Time the sidecar took for one decision.",
        unit="seconds",
        buckets=DECISIONS_S,
    ),
    MetricSpec(
        "rollback_duration_seconds",
        _H,
        "Time a restore took.",
        unit="seconds",
        buckets=DURATIONS_S,
        reserved=True,
    ),
    MetricSpec(
        "snapshot_duration_seconds",
        _H,
        "Time a snapshot took.",
        ("tier",),
        unit="seconds",
        buckets=DURATIONS_S,
        reserved=True,
    ),
    MetricSpec("sidecar_runs", _G, "Runs that the sidecar knows.", ("state",), per_run=False),
    MetricSpec(
        "sidecar_requests_total",
        _C,
        "Requests answered.",
        ("route", "status"),
        per_run=False,
    ),
    MetricSpec(
        "sidecar_request_duration_seconds",
        _H,
        "Time until an answer began.",
        ("route",),
        unit="seconds",
        buckets=DURATIONS_S,
        per_run=False,
    ),
    MetricSpec(
        "sidecar_loop_lag_window_max_seconds",
        _G,
        "Longest time the event loop was late in the last 1 to 2 minutes.",
        unit="seconds",
        per_run=False,
    ),
    MetricSpec("sidecar_listeners", _G, "Clients that listen to live events.", per_run=False),
    MetricSpec("sidecar_database_queue", _G, "Writes that wait for the database.", per_run=False),
    MetricSpec(
        "sidecar_database_errors_total",
        _C,
        "Failures of the database; each try of a write that waits is one.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_database_lost_total",
        _C,
        "Writes that were given up: refused for what they are, or no room was left to wait.",
        per_run=False,
    ),
    MetricSpec("sidecar_store_trouble", _G, "1 while a disk or the database fails.", per_run=False),
    MetricSpec(
        "sidecar_store_bytes",
        _G,
        "Size of all series, as last counted.",
        unit="bytes",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_lost_records_total",
        _C,
        "Reports that no disk took; their trainers were told to keep them.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_dropped_segments_total",
        _C,
        "Segments of series that made room for newer ones.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_snapshots_checked",
        _G,
        "Snapshots on disk that may be used, by what reading them again has shown: sound, damaged.",
        ("run", "result"),
        per_run=False,
    ),
    MetricSpec(
        "sidecar_verified_bytes_total",
        _C,
        "Bytes of snapshots that were read again.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_grafana_up",
        _G,
        "1 while Grafana answers and takes what is written, else 0; absent where none is kept.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_grafana_left_alone",
        _G,
        "Things in Grafana that differ and are left alone: edited by hand, of a newer release, "
        "or read from files.",
        ("why",),
        per_run=False,
    ),
    MetricSpec(
        "sidecar_grafana_writes_total",
        _C,
        "Dashboards, folders and rule groups that were written to Grafana.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_grafana_failures_total",
        _C,
        "Looks at Grafana that failed, by HTTP status; 0: no answer.",
        ("status",),
        per_run=False,
    ),
    MetricSpec(
        "sidecar_annotations_total",
        _C,
        "Marks for Grafana that were written, or refused by it.",
        ("outcome",),
        per_run=False,
    ),
    MetricSpec(
        "sidecar_annotations_waiting", _G, "Marks that wait for Grafana in memory.", per_run=False
    ),
    MetricSpec(
        "sidecar_token_trouble",
        _G,
        "1 while a token file makes no sense, and the tokens of before stay in use.",
        per_run=False,
    ),
    MetricSpec(
        "sidecar_job_errors_total", _C, "Background jobs that failed.", ("job",), per_run=False
    ),
)

_BY_NAME = {s.name: s for s in CATALOG}


def spec(name: str) -> MetricSpec:
    """The metric of that name, without the prefix; KeyError if there is none."""
    return _BY_NAME[name]
