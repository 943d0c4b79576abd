"""Marks reach Grafana, and its troubles reach nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from sentinel.core.errors import ConfigError
from sentinel.core.types import Action
from sentinel.dashboards.annotate import AnnotationWriter, writer_from
from sentinel.dashboards.grafana import (
    TOKEN_VARIABLE,
    URL_VARIABLE,
    GrafanaError,
    GrafanaPort,
    Target,
)
from tests.support.fake_grafana import TOKEN, fake_grafana
from tests.support.waits import until

NOW = 1_700_000_000.5


def rollback(writer: AnnotationWriter, step: int = 412, reason: str = "4th hot step") -> None:
    writer.acted(
        run="r7", step=step, action=Action.ROLLBACK, rule="loss_spike", reason=reason, now=NOW
    )


class Sink:
    """Remembers; fails as told; blocks while `held`."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.texts: list[str] = []
        self.free = threading.Event()
        self.free.set()

    def annotate(self, at: float, text: str, tags: Sequence[str]) -> None:
        self.free.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        self.texts.append(text)

    def annotated(self, at: float, text: str, tags: Sequence[str]) -> bool:
        return text in self.texts

    def close(self) -> None:
        pass


def test_skips_rollbacks_and_halts_are_marked_and_found_by_the_tags_of_the_dashboard() -> None:
    with fake_grafana() as grafana:
        writer = AnnotationWriter(lambda: GrafanaPort(Target(grafana.url, TOKEN)))
        for action in Action:
            writer.acted(
                run="r7", step=5, action=action, rule="grad_norm", reason="12 x > 10 x", now=NOW
            )
        until(lambda: writer.written == 3)
        writer.close()
    assert [a["tags"][1] for a in grafana.annotations] == ["skip", "rollback", "halt"]
    first = grafana.annotations[0]
    assert first["time"] == 1_700_000_000_500
    assert {"sentinel", "run:r7"} <= set(first["tags"])
    assert first["text"] == "<b>skip</b> at step 5: 12 x &gt; 10 x"


def test_the_sidecars_row_of_a_decision_says_the_same() -> None:
    row = {
        "step": 412,
        "attempt": 0,
        "action": "rollback",
        "rule": "loss_spike",
        "reason": "4th hot step",
        "target": 400,
        "source": "sidecar",
        "at": NOW,
    }
    sink = Sink()
    writer = AnnotationWriter(lambda: sink)
    writer.decided("r7", row)
    rollback(writer)
    until(lambda: writer.written == 2)
    writer.close()
    assert len(set(sink.texts)) == 1


def test_a_grafana_that_comes_back_gets_what_it_missed_in_order() -> None:
    with fake_grafana() as grafana:
        grafana.fail_next(503, times=3)
        writer = AnnotationWriter(
            lambda: GrafanaPort(Target(grafana.url, TOKEN)), first_pause_s=0.01
        )
        for step in (1, 2):
            rollback(writer, step)
        until(lambda: writer.written == 2)
        writer.close()
    assert ["step 1" in a["text"] for a in grafana.annotations] == [True, False]
    assert writer.dropped == 0


def test_a_mark_that_is_refused_is_dropped_and_the_next_one_written() -> None:
    sink = Sink(GrafanaError("no", 400))
    writer = AnnotationWriter(lambda: sink)
    rollback(writer, 1)
    rollback(writer, 2)
    until(lambda: writer.written == 1)
    writer.close()
    assert writer.dropped == 1
    assert "step 2" in sink.texts[0]


def test_an_error_that_nobody_thought_of_ends_nothing() -> None:
    writer = AnnotationWriter(lambda: sink)
    sink = Sink(RuntimeError("odd"))
    rollback(writer, 1)
    rollback(writer, 2)
    until(lambda: writer.written == 1)
    writer.close()
    assert writer.dropped == 1


def test_a_hanging_grafana_blocks_nobody_and_the_oldest_marks_go() -> None:
    sink = Sink()
    sink.free.clear()
    writer = AnnotationWriter(lambda: sink, capacity=3)
    rollback(writer, 0)
    until(lambda: not writer._queue)  # the worker holds it, inside the hanging request
    for step in range(1, 6):
        rollback(writer, step)  # would never return if it waited for the sink
    assert writer.dropped == 2
    sink.free.set()
    until(lambda: writer.written == 4)
    writer.close()
    assert [t.split("step ")[1][0] for t in sink.texts] == ["0", "3", "4", "5"]


def test_closing_does_not_wait_for_a_grafana_that_is_away() -> None:
    away = GrafanaError("away", transient=True)
    sink = Sink(*[away] * 1000)
    writer = AnnotationWriter(lambda: sink, first_pause_s=3600.0)
    rollback(writer)
    rollback(writer)
    until(lambda: len(sink.failures) < 1000)
    writer.close(timeout_s=20.0)
    assert writer._thread is not None
    assert not writer._thread.is_alive()
    assert writer.dropped == 2
    rollback(writer)  # after the end: nothing happens


def test_trouble_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    away = GrafanaError("cannot reach Grafana", transient=True)
    sink = Sink(*[away] * 4)
    writer = AnnotationWriter(lambda: sink, first_pause_s=0.001)
    rollback(writer)
    until(lambda: writer.written == 1)
    writer.close()
    said = [r.getMessage() for r in caplog.records if r.name.endswith("annotate")]
    assert len(said) == 2
    assert "cannot reach Grafana" in said[0]
    assert "again" in said[1]


def test_there_is_a_writer_only_where_a_grafana_is_configured() -> None:
    assert writer_from({}) is None
    assert writer_from({TOKEN_VARIABLE: "x"}) is None
    with pytest.raises(ConfigError, match="token is missing"):
        writer_from({URL_VARIABLE: "https://g"})
    assert writer_from({URL_VARIABLE: "https://g", TOKEN_VARIABLE: "x"}) is not None
