"""Series for people: thinned without losing a spike, the same from any kind of directory."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sentinel.core.policy import Policy
from sentinel.core.types import LAYER_GRAD_NORM, LAYER_UPDATE_RATIO
from sentinel.sidecar.app import create_app
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.series import (
    BUCKET,
    DECODED,
    QueryError,
    SeriesFiles,
    _thin,
    _words,
    encode,
)
from sentinel.traces.recorder import Recorder
from tests.support import FakeClock
from tests.support.reports import Reporter, expected
from tests.support.simulated import BigGradient, Damage, NanGradient, SimulatedTrainer

FAULTS = (NanGradient(500), BigGradient(700, 40.0), Damage(900, 3.0))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SimulatedTrainer]:
    """An embedded run's own trace, in many segments."""
    place = tmp_path_factory.mktemp("runs") / "r7"
    recorder = Recorder(
        place,
        run="r7",
        policy=Policy(),
        state=SimulatedTrainer().state,
        layers=[{"name": f"l{at}"} for at in range(4)],
        segment_bytes=30_000,
    )
    trainer = SimulatedTrainer(seed=2, faults=FAULTS, layers=4, recorder=recorder)
    trainer.run(1200)
    return place, trainer


def files(tmp_path: Path) -> SeriesFiles:
    return SeriesFiles(tmp_path / "cache")


def test_with_enough_points_it_is_every_row(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path
) -> None:
    place, trainer = recorded
    names = ("loss", "grad_norm", "lr", "action")
    found = files(tmp_path).curves(place, names, None, None, 20_000)
    own = expected(trainer)
    assert not found["downsampled"]
    assert found["rows"] == 1200
    for name in names:
        assert found["series"][name] == {"step": own["step"], "value": own[name]}
    acted = [(s, a) for s, a in zip(own["step"], own["action"], strict=True) if a != "proceed"]
    assert [(one["step"], one["action"]) for one in found["actions"]] == acted


def test_a_range_holds_both_its_ends(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path
) -> None:
    found = files(tmp_path).curves(recorded[0], ("loss",), 100, 110, 1500)
    assert found["series"]["loss"]["step"] == list(range(100, 111))
    assert (found["from"], found["to"]) == (100, 110)
    empty = files(tmp_path).curves(recorded[0], ("loss",), 5000, None, 1500)
    assert (empty["rows"], empty["from"], empty["series"]["loss"]["step"]) == (0, None, [])


def test_thinned_curves_keep_spikes_and_what_was_no_number(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path
) -> None:
    place, trainer = recorded
    found = files(tmp_path).curves(place, ("grad_norm", "loss"), None, None, 60)
    assert found["downsampled"]
    norm = dict(zip(*found["series"]["grad_norm"].values(), strict=True))
    own = expected(trainer)
    finite = [v for v in own["grad_norm"] if isinstance(v, float)]
    assert norm[500] == "nan"
    assert norm[700] == max(finite)
    assert min(v for v in norm.values() if isinstance(v, float)) == min(finite)
    assert max(found["series"]["loss"]["value"]) == max(own["loss"])
    assert all(len(one["step"]) <= 60 for one in found["series"].values())


def test_thinning_keeps_the_extremes_of_every_bucket() -> None:
    chance = random.Random(4)
    for _ in range(100):
        rows = chance.randrange(30, 400)
        value = np.array([chance.gauss(0, 1) for _ in range(rows)])
        for _ in range(chance.randrange(4)):
            value[chance.randrange(rows)] = chance.choice([math.nan, math.inf, -math.inf])
        there = np.array([chance.random() < 0.9 for _ in range(rows)])
        points = chance.randrange(1, 40)
        kept = _thin(value, there, points)
        assert list(kept) == sorted(set(kept))
        assert len(kept) <= max(points, 3)
        finite = value[there & np.isfinite(value)]
        if len(finite):
            assert finite.max() in value[kept]
            assert finite.min() in value[kept]
        odd = np.flatnonzero(there & ~np.isfinite(value))
        if len(odd):
            assert odd[0] in kept
        assert there[kept].all()


def test_values_of_the_decisions_can_be_had_for_short_ranges(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, trainer = recorded
    found = files(tmp_path).curves(place, DECODED, 890, 930, 1500)["series"]
    steps = trainer.steps[890:931]
    scores = [s.decision.readings.spike_score for s in steps]
    shown = [float(v) for v in found["spike_score"]["value"]]
    assert np.array_equal(shown, scores, equal_nan=True)
    assert found["lr_factor"]["value"] == [s.decision.lr_factor for s in steps]
    assert set(found["loss_scale"]["value"]) == {None}
    monkeypatch.setattr("sentinel.sidecar.store.series.MOST_DECODED", 10)
    with pytest.raises(QueryError, match="narrow from and to"):
        files(tmp_path).curves(place, ("spike_score",), 890, 930, 1500)


def test_a_question_that_makes_no_sense_is_refused(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path
) -> None:
    with pytest.raises(QueryError, match="'weather'"):
        files(tmp_path).curves(recorded[0], ("weather",), None, None, 10)
    with pytest.raises(QueryError, match="points"):
        files(tmp_path).curves(recorded[0], ("loss",), None, None, 0)
    with pytest.raises(QueryError, match="per-layer"):
        files(tmp_path).layers(recorded[0], "../../etc/passwd", None, None, 10)


@pytest.mark.parametrize("points", [7, 40])
def test_a_layer_map_holds_the_maximum_of_each_bucket(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path, points: int
) -> None:
    place, trainer = recorded
    own = np.stack([s.observation.columns[LAYER_GRAD_NORM] for s in trainer.steps])
    for cached in (False, True):  # the second time from the cache
        found = files(tmp_path).layers(place, LAYER_GRAD_NORM, None, None, points)
        assert found["layers"] == ["l0", "l1", "l2", "l3"]
        assert len(found["values"]) == 4
        for at, (first, last) in enumerate(zip(found["steps"], found["last"], strict=True)):
            truth = own[first : last + 1].max(axis=0)
            shown = [float(row[at]) for row in found["values"]]
            np.testing.assert_allclose(shown, truth, rtol=1e-4)
        assert found["steps"][0] == 0
        assert found["last"][-1] == 1199
        assert list((tmp_path / "cache").rglob("*.npz")), cached


def test_a_short_range_of_layers_is_shown_step_by_step(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path
) -> None:
    place, _ = recorded
    found = files(tmp_path).layers(place, LAYER_GRAD_NORM, 480, 510, 300)
    assert found["steps"] == list(range(480, 511))
    assert [row[20] for row in found["values"]] == ["nan"] * 4
    ratio = files(tmp_path).layers(place, LAYER_UPDATE_RATIO, 480, 510, 300)
    assert ratio["steps"] == [480, 490, 500, 510]


def test_without_ends_a_short_run_is_shown_as_it_is_with_them(tmp_path: Path) -> None:
    place = tmp_path / "r8"
    recorder = Recorder(place, run="r8", policy=Policy(), state=SimulatedTrainer().state)
    SimulatedTrainer(seed=2, layers=4, recorder=recorder).run(40)
    recorder.close()
    wanted = files(tmp_path).layers(place, LAYER_GRAD_NORM, 0, 39, 300)
    assert wanted["steps"] == list(range(40))
    for first, last in ((None, None), (0, None), (None, 39)):
        assert files(tmp_path).layers(place, LAYER_GRAD_NORM, first, last, 300) == wanted
    half = files(tmp_path).layers(place, LAYER_GRAD_NORM, 20, None, 300)
    assert half["steps"] == list(range(20, 40))


def test_maxima_are_prepared_for_closed_segments_only(
    recorded: tuple[Path, SimulatedTrainer], tmp_path: Path
) -> None:
    some = files(tmp_path)
    made = 0
    while step := some.prepare(recorded[0], most=2):
        made += step
    segments = len(list(recorded[0].rglob("layers-*.seg")))
    assert made == segments - 1 > 2
    assert BUCKET == 64


def test_words_and_nulls_stand_where_there_is_no_number() -> None:
    values = np.array([[1.234567, math.nan], [-math.inf, math.inf], [0.0, -2e-9]], np.float32)
    assert _words(values) == [[1.2346, "nan"], [None, "inf"], [0.0, -2e-9]]
    assert json.loads(encode({"v": _words(values)}))["v"][1] == [None, "inf"]


@pytest.mark.slow
def test_a_million_steps_are_thinned_quickly(tmp_path: Path) -> None:
    from sentinel.traces.records import INDEX_DTYPE
    from sentinel.traces.segments import Kind, SegmentWriter
    from sentinel.traces.summary import footer

    place, rows = tmp_path / "r" / "0000-i", 8192
    place.mkdir(parents=True)
    for number in range(128):
        writer = SegmentWriter(place, "scalars", number)
        index = np.zeros(rows, INDEX_DTYPE)
        index["step"] = np.arange(rows) + number * rows
        index["present"] = 7
        index["loss"] = 2.0
        index["loss"][17] = 9.0 + number
        for kind, payload in footer(index.tobytes(), writer.size):
            writer.append(kind, payload)
        assert kind is Kind.TRAILER
        writer.close()
    import time

    before = time.process_time()
    found = files(tmp_path).curves(tmp_path / "r", ("loss", "grad_norm"), None, None, 1500)
    took = time.process_time() - before
    print(f"{found['rows']} rows in {took:.3f} s of CPU time")
    assert found["rows"] == 2**20
    assert max(found["series"]["loss"]["value"]) == 9.0 + 127
    assert took < 10.0  # generous: tests/bench measures it


class TestOverHttp:
    @pytest.fixture
    def service(self, tmp_path: Path, clock: FakeClock) -> Iterator[Service]:
        app = create_app(Settings(data_dir=tmp_path / "data"), clock=clock, timer=lambda: 0.0)
        service: Service = app.state.service
        service.app = app  # type: ignore[attr-defined]
        yield service
        service.close()

    async def get(self, service: Any, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.get(path)

    def test_series_layers_incidents_and_decisions(self, service: Service) -> None:
        import anyio

        reporter = Reporter(service, SimulatedTrainer(seed=2, faults=FAULTS, layers=4))
        reporter.register()
        reporter.steps(960)

        async def test() -> None:
            got = (await self.get(service, "/v1/runs/r/series?points=20000")).json()
            assert got["series"]["loss"]["value"] == expected(reporter.trainer)["loss"]
            thin = (await self.get(service, "/v1/runs/r/series?name=loss&to=800&points=30")).json()
            assert thin["downsampled"]
            assert thin["to"] == 800
            map_ = (await self.get(service, "/v1/runs/r/layers?from=0&to=99")).json()
            assert map_["rows"] == 100
            incidents = (await self.get(service, "/v1/runs/r/incidents")).json()["incidents"]
            assert {i["key"] for i in incidents} >= {"instability"}
            decisions = (await self.get(service, "/v1/runs/r/decisions")).json()["decisions"]
            assert decisions[0]["step"] > decisions[-1]["step"]
            for bad, status in (
                ("/v1/runs/r/series?from=x", 422),
                ("/v1/runs/r/series?name=weather", 422),
                ("/v1/runs/r/series?points=999999999999999999999", 422),
                ("/v1/runs/nobody/series", 404),
                ("/v1/runs/..%2F..%2Fetc/series", 404),
                ("/v1/runs/nobody/incidents", 404),
            ):
                answer = await self.get(service, bad)
                assert answer.status_code == status, bad
                if "%2F" not in bad:
                    assert set(answer.json()) == {"code", "detail"}

        anyio.run(test)
