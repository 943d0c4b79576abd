"""What sentinel owns in a Grafana is put back, what others changed is left alone, nobody waits."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.dashboards import push as pushing
from sentinel.dashboards import seal as sealing
from sentinel.dashboards.build import RUN_UID
from sentinel.dashboards.grafana import GrafanaPort, Target
from sentinel.dashboards.reconcile import STUCK_S, Port, Reconciler
from sentinel.dashboards.seal import Owner, seal, seal_of, unsealed, whose
from tests.support.fake_grafana import TOKEN, FakeGrafana, fake_grafana
from tests.support.schemas import grafana_schemas
from tests.support.waits import until

BOARDS = pushing.dashboards()
GROUP = ("sentinel", "sentinel")


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    """One that refuses what the official schemas refuse."""
    with fake_grafana(grafana_schemas()) as fake:
        yield fake


def keeper(grafana: FakeGrafana, **options: Any) -> Reconciler:
    runbooks = options.pop("runbooks", "")

    def want(port: Port) -> pushing.Wanted:
        return pushing.wanted(BOARDS, runbooks=runbooks, datasource=pushing.only_source(port))

    given = {"timer": time.monotonic} | options
    return Reconciler(lambda: GrafanaPort(Target(grafana.url, TOKEN)), want, **given)


def titles(grafana: FakeGrafana) -> str:
    title: str = grafana.dashboards[RUN_UID].body["title"]
    return title


class TestSeal:
    def test_a_seal_fits_what_it_was_put_on_and_goes_without_a_trace(self) -> None:
        board = BOARDS[0]
        sealed = seal(board, 7)
        mark = seal_of(sealed)
        assert mark is not None
        assert (mark.version, mark.content) == (7, sealing.digest(board))
        assert unsealed(sealed) == board
        assert seal_of(board) is None
        assert seal(sealed, 7) == sealed

    @pytest.mark.parametrize(
        ("version", "change", "owner"),
        [
            (7, {}, Owner.OURS),
            (7, {"title": "as Grafana rewrote it"}, Owner.OURS),  # nobody has saved it since
            (9, {}, Owner.OURS),  # somebody edited it and put it back
            (8, {"title": "mine"}, Owner.EDITED),
        ],
    )
    def test_version_or_contents_say_whose_it_is(
        self, version: int, change: dict[str, Any], owner: Owner
    ) -> None:
        board = {**seal(BOARDS[0], 7), "version": version, "id": 3} | change
        found = {"dashboard": board, "meta": {"folderUid": "sentinel"}}
        assert whose(found, "sentinel") is owner

    def test_a_number_that_grafana_writes_in_its_own_way_is_the_same_number(self) -> None:
        board = {"uid": "x", "panels": [{"fill": 1.0, "width": 0.5}], "id": 3}
        rewritten = {"panels": [{"width": 0.5, "fill": 1}], "uid": "x", "version": 9}
        assert sealing.digest(board) == sealing.digest(rewritten)
        assert sealing.digest(board) != sealing.digest({**board, "panels": [{"fill": 2.0}]})

    def test_one_without_a_mark_or_with_a_broken_one_is_somebody_elses(self) -> None:
        broken = seal(BOARDS[0], 1)
        broken["templating"]["list"][-1]["query"] = "nonsense"
        for board in (BOARDS[0], broken):
            assert whose({"dashboard": {**board, "version": 1}}, "sentinel") is Owner.EDITED

    @pytest.mark.parametrize(
        ("release", "owner"),
        [("0.0.1", Owner.OURS), ("999.0", Owner.NEWER), ("odd", Owner.OURS)],
    )
    def test_a_later_release_is_left_alone_and_an_earlier_one_is_not(
        self, release: str, owner: Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sealing, "__version__", release)
        board = {**seal(BOARDS[0], 1), "version": 1}
        monkeypatch.undo()
        assert whose({"dashboard": board, "meta": {}}, "sentinel") is owner

    def test_one_that_was_moved_and_one_from_files_are_left_alone(self) -> None:
        board = {**seal(BOARDS[0], 1), "version": 1}
        moved = {"dashboard": board, "meta": {"folderUid": "elsewhere"}}
        assert whose(moved, "sentinel") is Owner.EDITED
        assert whose({"dashboard": board, "meta": {"provisioned": True}}, "") is Owner.FILES


class TestTurns:
    def test_an_empty_grafana_is_filled_and_then_left_in_peace(self, grafana: FakeGrafana) -> None:
        one = keeper(grafana)
        one.turn()
        assert (one.up, one.writes, one.trouble) == (True, 3, "")
        writes = list(grafana.writes)
        one.turn()
        keeper(grafana).turn()  # another sidecar's
        assert grafana.writes == writes
        assert seal_of(grafana.dashboards[RUN_UID].body) is not None

    def test_what_was_deleted_comes_back(self, grafana: FakeGrafana) -> None:
        one = keeper(grafana)
        one.turn()
        grafana.dashboards.clear()
        grafana.groups.clear()
        one.turn()
        assert set(grafana.dashboards) == {RUN_UID}
        assert set(grafana.groups) == {GROUP}

    def test_what_an_earlier_release_wrote_is_replaced(
        self, grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sealing, "__version__", "0.0.1")
        keeper(grafana, runbooks="https://old").turn()
        monkeypatch.undo()
        one = keeper(grafana)
        one.turn()
        assert (one.writes, one.left_alone) == (2, {})
        assert grafana.dashboards[RUN_UID].body["version"] == 2
        one.turn()
        assert one.writes == 2

    def test_what_somebody_changed_by_hand_is_left_alone_and_told_once(
        self, grafana: FakeGrafana, caplog: pytest.LogCaptureFixture
    ) -> None:
        one = keeper(grafana)
        one.turn()
        saved = grafana.dashboards[RUN_UID]
        saved.body |= {"title": "mine", "version": 2}
        grafana.groups[GROUP]["rules"][0] |= {"provenance": "", "for": "9h"}
        before = list(grafana.writes)
        for _ in range(3):
            one.turn()
        assert grafana.writes == before
        assert one.left_alone == {
            f"dashboard {RUN_UID}": "edited",
            "alert rules sentinel": "edited",
        }
        assert (one.up, titles(grafana)) == (True, "mine")
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(told) == 2
        saved.body |= {"title": BOARDS[0]["title"], "version": 3}  # they put it back
        one.turn()
        assert one.left_alone == {"alert rules sentinel": "edited"}

    def test_what_somebody_changed_by_hand_is_put_back_when_that_was_asked_for(
        self, grafana: FakeGrafana
    ) -> None:
        keeper(grafana).turn()
        grafana.dashboards[RUN_UID].body |= {"title": "mine", "version": 2}
        one = keeper(grafana, overwrite=True)
        one.turn()
        assert (titles(grafana), one.left_alone) == (BOARDS[0]["title"], {})
        assert grafana.dashboards[RUN_UID].body["version"] == 3

    def test_a_rule_that_somebody_added_to_the_group_is_not_deleted(
        self, grafana: FakeGrafana
    ) -> None:
        one = keeper(grafana)
        one.turn()
        rules = grafana.groups[GROUP]["rules"]
        rules.append({**rules[0], "uid": "theirs", "title": "Theirs"})
        one.turn()
        assert one.left_alone == {"alert rules sentinel": "edited"}
        assert "theirs" in {r["uid"] for r in grafana.groups[GROUP]["rules"]}

    def test_nothing_of_a_later_release_is_touched_its_rules_neither(
        self, grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sealing, "__version__", "999.1")
        keeper(grafana, runbooks="https://new").turn()
        monkeypatch.undo()
        one = keeper(grafana, overwrite=True)
        one.turn()
        assert one.left_alone == {f"dashboard {RUN_UID}": "newer", "alert rules sentinel": "newer"}
        grafana.groups.clear()
        one.turn()
        assert one.writes == 0

    def test_who_is_faster_in_grafana_is_not_overwritten(self, grafana: FakeGrafana) -> None:
        keeper(grafana, runbooks="https://old").turn()
        saved = grafana.dashboards[RUN_UID]

        def edit(verb: str, path: str) -> None:
            if verb == "POST" and path.endswith("/dashboards/db"):
                saved.body |= {"title": "mine", "version": 2}

        grafana.before = edit
        one = keeper(grafana)
        one.turn()
        assert (one.up, dict(one.failures), titles(grafana)) == (False, {"412": 1}, "mine")
        grafana.before = None
        one.turn()
        assert one.left_alone == {f"dashboard {RUN_UID}": "edited"}


class TestTrouble:
    @pytest.mark.parametrize("status", [401, 403, 404, 409, 412, 429, 500, 502])
    def test_a_refusal_is_counted_told_once_and_over_when_it_is_over(
        self, grafana: FakeGrafana, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        one = keeper(grafana)
        # Not in the first requests: 404 is an answer there.
        grafana.before = lambda verb, path: verb == "GET" or grafana.fail_next(status)
        for _ in range(3):
            one.turn()
        assert (one.up, dict(one.failures)) == (False, {str(status): 3})
        assert str(status) in one.trouble
        assert TOKEN not in one.trouble + caplog.text
        grafana.before, grafana._failures = None, []
        one.turn()
        assert (one.up, one.trouble) == (True, "")
        told = [r.getMessage() for r in caplog.records]
        assert [line.partition(":")[0] for line in told] == [
            "Grafana is not kept as it should be",
            "Grafana is kept again",
        ]
        assert set(grafana.dashboards) == {RUN_UID}

    def test_a_grafana_that_is_down_is_no_answer(self) -> None:
        with fake_grafana() as gone:
            url = gone.url
        one = Reconciler(
            lambda: GrafanaPort(Target(url, TOKEN)),
            lambda port: pushing.wanted(BOARDS),
            timer=time.monotonic,
        )
        one.turn()
        assert (one.up, dict(one.failures)) == (False, {"0": 1})

    @pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"{}", b'{"dashboard": 3}'])
    def test_an_answer_of_an_odd_form_is_trouble_and_no_crash(
        self, grafana: FakeGrafana, body: bytes
    ) -> None:
        one = keeper(grafana)
        grafana.fail_next(200, body, times=9)
        one.turn()
        assert one.up is False
        assert one.turns == 1

    def test_one_that_hangs_holds_one_thread_and_nobody_else(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = [0.0]
        with socket.create_server(("127.0.0.1", 0)) as hanging:
            url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
            one = Reconciler(
                lambda: GrafanaPort(Target(url, TOKEN), timeout_s=3.0),
                lambda port: pushing.wanted(BOARDS),
                timer=lambda: now[0],
            )
            one.begin()
            before = threading.active_count()
            for _ in range(5):
                one.begin()
                now[0] += STUCK_S / 2.9
            assert threading.active_count() <= before
            assert (one.up, one.turns) == (False, 0)
            assert "does not come to an end" in one.trouble
        until(lambda: one.turns == 1)
        assert "cannot reach Grafana" in one.trouble
        told = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(told) == 1
