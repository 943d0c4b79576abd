"""The generated files are up to date, are what Grafana takes, and lead to runbooks that exist."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
import yaml

from sentinel.core import advice
from sentinel.core.catalog import CATALOG, PREFIX
from sentinel.core.policy import Rules
from sentinel.dashboards import alerts, panels
from sentinel.dashboards.build import FILES, RUN_DASHBOARD, build, generate
from tests.support import ROOT
from tests.support.schemas import grafana_schemas

BOARD: dict[str, Any] = json.loads((ROOT / RUN_DASHBOARD).read_text(encoding="utf-8"))
RUNBOOKS = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The headings' addresses, as a Markdown renderer makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_what_the_catalogue_gives(name: str) -> None:
    path = ROOT / name
    assert path.is_file(), f"{name} is missing; write it with: sentinel dashboards build"
    assert path.read_text(encoding="utf-8") == generate()[name], (
        f"{name} is stale; write it with: sentinel dashboards build"
    )


def test_building_again_changes_nothing_and_repairs_what_was_edited(tmp_path: Any) -> None:
    assert build(tmp_path) == list(FILES)
    assert build(tmp_path) == []
    (tmp_path / RUN_DASHBOARD).write_text("{}")
    assert build(tmp_path) == [RUN_DASHBOARD]


def test_the_dashboard_is_valid_by_the_official_schemas() -> None:
    assert grafana_schemas().dashboard(BOARD) == []
    assert BOARD["schemaVersion"] == 42


def test_the_alert_rules_are_valid_by_the_official_schemas() -> None:
    assert grafana_schemas().rule_group(alerts.grafana_group()) == []


def test_the_schemas_find_a_wrong_option_a_wrong_query_and_a_wrong_rule() -> None:
    schemas = grafana_schemas()
    broken = json.loads(json.dumps(BOARD))
    chart = next(p for p in broken["panels"] if p["type"] == "timeseries")
    chart["options"]["legend"]["placement"] = "left"
    chart["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1
    chart["targets"][0]["expression"] = "up"
    assert len(schemas.dashboard(broken)) >= 3
    group = alerts.grafana_group()
    group["rules"][0]["noDataState"] = "Fine"
    assert len(schemas.rule_group(group)) == 1


def test_panel_ids_are_unique_and_panels_do_not_overlap() -> None:
    ids = [p["id"] for p in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_has_a_description_and_its_runbook_exists() -> None:
    known = anchors(RUNBOOKS)
    for panel in panels.panels():
        assert panel.description, panel.title
        assert panel.runbook in known, f"{panel.title}: no heading #{panel.runbook}"


def test_every_alert_has_a_section_in_the_runbooks() -> None:
    assert {one.name.lower() for one in alerts.ALERTS} <= anchors(RUNBOOKS)


def test_every_flag_has_a_section_in_the_runbooks_that_says_all_it_should() -> None:
    flags = [f.name for f in fields(Rules)]
    flags = flags[flags.index("level_shift") :]
    assert set(advice.FLAGS) < set(flags)
    flags.remove("attention_logit")  # has an alert of its own
    for flag in flags:
        found = re.search(rf"^### {flag}$\n\n(.*?)^##", RUNBOOKS, re.MULTILINE | re.DOTALL)
        assert found, f"no heading {flag}"
        said = re.findall(r"^\*\*(\w+)", found[1], re.MULTILINE)
        assert said[:5] == ["Means", "Healthy", "First", "Then", "Silence"], flag


def test_no_panel_asks_for_a_metric_that_nothing_feeds() -> None:
    asked = {
        m.name
        for panel in panels.panels()
        for query in panel.queries
        for m in panels.metrics_of(query.expr)
    }
    assert asked
    assert not asked & {m.name for m in CATALOG if m.reserved}


def test_a_panel_on_a_reserved_metric_is_left_out_until_something_feeds_it() -> None:
    (reserved, *_) = [m for m in CATALOG if m.reserved]
    query = panels.Query(f"{PREFIX}{reserved.name}", "x")
    panel = panels.Panel(id=1, title="t", kind="stat", description="d", queries=(query,))
    assert panel.fed() is None
    fed = panels.Query(f"{PREFIX}loss", "loss")
    both = panels.Panel(id=1, title="t", kind="stat", description="d", queries=(query, fed))
    kept = both.fed()
    assert kept is not None
    assert kept.queries == (fed,)


def test_a_metric_that_is_not_in_the_catalogue_is_an_error() -> None:
    with pytest.raises(KeyError):
        panels.metrics_of(f"rate({PREFIX}los_total[5m])")


def test_the_lines_in_the_panels_are_the_limits_of_the_default_policy() -> None:
    by_title = {p["title"]: p for p in BOARD["panels"]}
    logit = by_title["Attention max logit, top 8 layers"]
    assert [s["value"] for s in logit["fieldConfig"]["defaults"]["thresholds"]["steps"]] == [
        None,
        50,
    ]
    exprs = [t["expr"] for t in by_title["Gradient norm"]["targets"]]
    assert '10 * max(sentinel_grad_norm_baseline{run="$run"})' in exprs


def test_prometheus_and_grafana_are_told_the_same() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/sentinel-rules.yaml").read_text())
    operator = yaml.safe_load((ROOT / "deploy/k8s/prometheusrule.yaml").read_text())
    assert operator["spec"] == rules
    in_prometheus = {r["alert"]: r["expr"] for g in rules["groups"] for r in g["rules"]}
    file = yaml.safe_load((ROOT / "grafana/provisioning/alerting/sentinel.yaml").read_text())
    in_grafana = {
        r["title"]: r["data"][0]["model"]["expr"] for g in file["groups"] for r in g["rules"]
    }
    assert in_prometheus == in_grafana


def test_what_happens_without_data_and_on_errors_is_set_on_every_rule() -> None:
    for rule in alerts.grafana_group()["rules"]:
        assert (rule["noDataState"], rule["execErrState"]) == ("OK", "Error")


def test_no_text_for_grafana_holds_a_dollar_which_its_files_would_expand() -> None:
    text = (ROOT / "grafana/provisioning/alerting/sentinel.yaml").read_text()
    assert "$" not in text


def test_no_alert_compares_a_signal_that_can_be_nan() -> None:
    gauges = ("loss", "loss_spike_score", "grad_norm", "layer_grad_norm", "learning_rate")
    for one in alerts.ALERTS:
        asked = {m.name for m in panels.metrics_of(one.expr)}
        assert asked <= set(one.metrics), one.name
        assert not asked & set(gauges), one.name
