"""Pushing brings a Grafana to what is wanted, once, and says what stands in the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.main import main
from sentinel.core.errors import ConfigError
from sentinel.dashboards import alerts
from sentinel.dashboards import push as pushing
from sentinel.dashboards.build import RUN_UID
from sentinel.dashboards.grafana import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    GrafanaError,
    GrafanaPort,
    Target,
)
from tests.support.fake_grafana import TOKEN, FakeGrafana, fake_grafana
from tests.support.schemas import grafana_schemas

BOARDS = pushing.dashboards()


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with fake_grafana(prefix="/g") as fake:
        yield fake


@pytest.fixture
def port(grafana: FakeGrafana) -> Iterator[GrafanaPort]:
    with GrafanaPort(Target(grafana.url, TOKEN)) as connected:
        yield connected


def want(**options: Any) -> pushing.Wanted:
    return pushing.wanted(BOARDS, **{"datasource": "prom-1", **options})


def push(port: GrafanaPort, wanted: pushing.Wanted | None = None) -> list[tuple[str, str]]:
    plan = pushing.compare(port, wanted or want())
    return [(c.what, c.name) for c in pushing.apply(port, plan)]


def test_what_is_pushed_passes_the_official_schemas() -> None:
    with fake_grafana(grafana_schemas()) as checked:
        with GrafanaPort(Target(checked.url, TOKEN)) as port:
            assert len(push(port)) == 3
        assert checked.dashboards[RUN_UID].folder == "sentinel"


def test_the_fake_refuses_what_the_schemas_refuse() -> None:
    wrong = ({**BOARDS[0], "panels": [{"type": "row", "tittle": "x"}]},)
    with (
        fake_grafana(grafana_schemas()) as checked,
        GrafanaPort(Target(checked.url, TOKEN)) as port,
        pytest.raises(GrafanaError, match="tittle"),
    ):
        push(port, pushing.wanted(wrong, datasource="prom-1"))


def test_the_first_push_writes_everything_and_the_second_nothing(
    grafana: FakeGrafana, port: GrafanaPort
) -> None:
    assert push(port) == [
        ("folder", "sentinel"),
        ("dashboard", RUN_UID),
        ("alert rules", "sentinel"),
    ]
    writes = list(grafana.writes)
    assert push(port) == []
    assert grafana.writes == writes
    stored = grafana.groups["sentinel", "sentinel"]["rules"]
    assert {r["title"] for r in stored} == {one.name for one in alerts.ALERTS}
    assert {q["datasourceUid"] for r in stored for q in r["data"]} == {"prom-1", "__expr__"}


def test_comparing_writes_nothing(grafana: FakeGrafana, port: GrafanaPort) -> None:
    assert len(pushing.compare(port, want()).changes) == 3
    assert grafana.writes == []


def test_an_edit_in_grafana_is_named_and_put_back(grafana: FakeGrafana, port: GrafanaPort) -> None:
    push(port)
    saved = grafana.dashboards[RUN_UID]
    saved.body["panels"][1]["title"] = "mine"
    grafana.groups["sentinel", "sentinel"]["rules"][0]["for"] = "9h"
    plan = pushing.compare(port, want())
    assert [c.what for c in plan.changes] == ["dashboard", "alert rules"]
    assert 'panels[1].title: "mine" -> "Run"' in str(plan.changes[0])
    assert 'for: "9h"' in str(plan.changes[1])
    assert len(push(port)) == 2
    assert grafana.dashboards[RUN_UID].body["version"] == 2
    assert push(port) == []


def test_a_panel_that_somebody_added_is_a_difference(
    grafana: FakeGrafana, port: GrafanaPort
) -> None:
    push(port)
    there = grafana.dashboards[RUN_UID].body["panels"]
    there.append({**there[-1], "id": 999})
    plan = pushing.compare(port, want())
    assert [d.partition(":")[0] for d in plan.changes[0].differences] == ["panels"]
    push(port)
    assert len(grafana.dashboards[RUN_UID].body["panels"]) == len(BOARDS[0]["panels"])


def test_a_rule_that_somebody_added_or_removed_is_a_difference(
    grafana: FakeGrafana, port: GrafanaPort
) -> None:
    push(port)
    rules = grafana.groups["sentinel", "sentinel"]["rules"]
    rules.append({**rules[0], "uid": "more", "title": "More"})
    assert push(port) == [("alert rules", "sentinel")]
    del grafana.groups["sentinel", "sentinel"]["rules"][2]
    assert push(port) == [("alert rules", "sentinel")]
    assert len(grafana.groups["sentinel", "sentinel"]["rules"]) == len(alerts.ALERTS)


def test_who_was_faster_in_grafana_is_not_overwritten(
    grafana: FakeGrafana, port: GrafanaPort
) -> None:
    push(port)
    saved = grafana.dashboards[RUN_UID]
    saved.body["title"] = "theirs"

    def edit(verb: str, path: str) -> None:
        if verb == "POST" and path.endswith("/dashboards/db"):
            saved.body["version"] += 1

    grafana.before = edit
    with pytest.raises(GrafanaError, match="changed in Grafana while this ran") as refused:
        push(port)
    assert refused.value.status == 412
    assert grafana.dashboards[RUN_UID].body["title"] == "theirs"


def test_runbooks_get_their_address_everywhere(grafana: FakeGrafana, port: GrafanaPort) -> None:
    push(port, want(runbooks="https://wiki/s"))
    variables = grafana.dashboards[RUN_UID].body["templating"]["list"]
    assert [v["query"] for v in variables if v["name"] == "runbooks"] == ["https://wiki/s"]
    (rule, *_) = grafana.groups["sentinel", "sentinel"]["rules"]
    assert rule["annotations"]["runbook_url"].startswith("https://wiki/s#")


def test_alert_rules_can_be_left_alone_and_the_folder_chosen(
    grafana: FakeGrafana, port: GrafanaPort
) -> None:
    push(port, want(datasource=None, folder="ml"))
    assert grafana.groups == {}
    assert grafana.dashboards[RUN_UID].folder == "ml"


def test_the_only_prometheus_is_found_and_several_are_named(
    grafana: FakeGrafana, port: GrafanaPort
) -> None:
    assert pushing.only_source(port) == "prom-1"
    grafana.sources.append({"uid": "loki", "type": "loki"})
    assert pushing.only_source(port) == "prom-1"
    grafana.sources.append({"uid": "prom-2", "type": "prometheus"})
    with pytest.raises(pushing.PushError, match=r"prom-1, prom-2.*--datasource"):
        pushing.only_source(port)
    grafana.sources.clear()
    with pytest.raises(pushing.PushError, match="has none"):
        pushing.only_source(port)


@pytest.mark.parametrize(
    ("status", "says", "transient"),
    [
        (401, "service account token", False),
        (403, "role Editor", False),
        (409, "has to be deleted there first", False),
        (412, "push again", False),
        (429, "429", True),
        (500, "asked to say 500", True),
        (503, "503", True),
    ],
)
def test_a_refusal_says_what_to_do_and_never_the_token(
    grafana: FakeGrafana, port: GrafanaPort, status: int, says: str, transient: bool
) -> None:
    grafana.fail_next(status)
    with pytest.raises(GrafanaError, match=says) as refused:
        push(port)
    assert (refused.value.status, refused.value.transient) == (status, transient)
    assert TOKEN not in str(refused.value)
    assert TOKEN not in repr(Target(grafana.url, TOKEN))


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"", b"[1, 2"])
def test_a_page_that_is_not_grafana_is_recognised(
    grafana: FakeGrafana, port: GrafanaPort, body: bytes
) -> None:
    grafana.fail_next(200, body)
    with pytest.raises(GrafanaError, match="no JSON"):
        push(port)


@pytest.mark.parametrize("body", [b"nothing of note", b"[]", b'"text"', b'{"message": {"a": 1}}'])
def test_a_refusal_in_an_odd_form_is_still_a_refusal(
    grafana: FakeGrafana, port: GrafanaPort, body: bytes
) -> None:
    grafana.fail_next(502, body)
    with pytest.raises(GrafanaError) as refused:
        push(port)
    assert refused.value.status == 502


def test_a_wrong_token_is_refused(grafana: FakeGrafana) -> None:
    with (
        GrafanaPort(Target(grafana.url, "glsa_other")) as port,
        pytest.raises(GrafanaError, match="the token is not accepted"),
    ):
        push(port)


def test_nobody_at_the_address_is_said_plainly() -> None:
    with fake_grafana() as gone:
        url = gone.url
    with (
        GrafanaPort(Target(url, TOKEN)) as port,
        pytest.raises(GrafanaError, match="cannot reach Grafana") as refused,
    ):
        push(port)
    assert refused.value.transient


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("grafana:3000", "must look like"),
        ("ftp://grafana", "must look like"),
        ("https://", "must look like"),
        ("https://user:pw@grafana", "neither user, password"),
        ("https://grafana/?token=x", "neither user, password"),
        ("https://grafana:99999", "cannot be read"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Target(url, TOKEN)
    assert "pw" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "é"])
def test_a_token_that_cannot_be_one_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError, match="token") as refused:
        Target("https://grafana", token)
    assert repr(token) not in str(refused.value)


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    by_file = {URL_VARIABLE: "https://g", TOKEN_FILE_VARIABLE: str(file), TOKEN_VARIABLE: "x"}
    assert Target.from_environment(by_file).token == "from-file"
    assert Target.from_environment({TOKEN_VARIABLE: " y\n"}, url="https://g").token == "y"
    with pytest.raises(ConfigError, match=r"cannot read the grafana token from .*No such file"):
        Target.from_environment({}, url="https://g", token_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="url is missing"):
        Target.from_environment({})


def test_a_folder_without_dashboards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pushing.PushError, match="no dashboards in"):
        pushing.dashboards(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(pushing.PushError, match="has no uid"):
        pushing.dashboards(tmp_path)


# ---- the command --------------------------------------------------------------------------


@pytest.fixture
def configured(
    grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> FakeGrafana:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    monkeypatch.setenv(URL_VARIABLE, grafana.url)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    return grafana


def test_the_command_pushes_once_and_then_has_nothing_to_do(
    configured: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "diff"]) == 1
    assert "dashboard sentinel-run: is missing" in capsys.readouterr().out
    assert main(["dashboards", "push", "--dry-run"]) == 0
    assert configured.writes == []
    assert main(["dashboards", "push"]) == 0
    assert "wrote dashboard sentinel-run" in capsys.readouterr().out
    assert main(["dashboards", "push"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["dashboards", "diff"]) == 0


def test_the_command_speaks_json(
    configured: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "push", "--json", "--no-alerts"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["written"] is True
    assert [c["what"] for c in said["changes"]] == ["folder", "dashboard"]
    assert configured.groups == {}


def test_the_command_ends_with_a_plain_sentence(
    configured: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    configured.fail_next(403)
    assert main(["dashboards", "push"]) == 1
    shown = capsys.readouterr()
    assert "sentinel: Grafana at" in shown.err
    assert TOKEN not in shown.err + shown.out
    assert "Traceback" not in shown.err


def test_build_check_finds_a_stale_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "build", "--root", str(tmp_path)]) == 0
    assert main(["dashboards", "build", "--check", "--root", str(tmp_path)]) == 0
    (tmp_path / "grafana/dashboards/run.json").write_text("{}")
    assert main(["dashboards", "build", "--check", "--root", str(tmp_path)]) == 1
    assert "run.json is stale" in capsys.readouterr().err
