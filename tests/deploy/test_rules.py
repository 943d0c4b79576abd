"""The alert rules under promtool, and the example route under amtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sentinel.dashboards.alerts import ALERTS
from tests.support import ROOT, require

RULES = ROOT / "deploy/prometheus/sentinel-rules.yaml"
CASES = ROOT / "deploy/prometheus/tests/sentinel-rules-test.yaml"
ROUTES = ROOT / "deploy/alertmanager/alertmanager.yaml"


def tool(name: str, package: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which(name)
    require(program, f"{name} (apt-get install {package})")
    command = [str(program), *(str(a) for a in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_promtool_takes_the_rules() -> None:
    done = tool("promtool", "prometheus", "check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    done = tool("promtool", "prometheus", "test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for one in case["promql_expr_test"]:
            # An expression with samples names its alerts; one without is about all it matches.
            if one.get("exp_samples"):
                fires |= set(re.findall(r'alertname="(\w+)"', one["expr"]))
            elif "alertname" not in one["expr"]:
                silent |= {a.name for a in ALERTS}
            else:
                silent |= set(re.findall(r'alertname="(\w+)"', one["expr"]))
    assert fires == {a.name for a in ALERTS}
    assert silent == {a.name for a in ALERTS}


# One break of each thing that the rules were written for; each must turn a case red.
BREAKS = [
    (
        "a counter's first time is missed",
        re.compile(r" or 0 \* max by \(run, rule\) \([^)]*\)"),
        "",
    ),
    (
        "a gap brings old news back",
        re.compile(r"last_over_time\((\S+)\[1h\] offset"),
        r"(\1 offset",
    ),
    (
        "a counter that starts anew is missed",
        re.compile(r"max by \(run, rule\) \(increase[^\n]*\n +or\n"),
        "\n",
    ),
    ("a new pod brings old news back", "max by (run, rule) (", "max by (run, rule, instance) ("),
    ("a rollback without a target is no failure", 'outcome!="restored"', 'outcome="failed"'),
    ("any flag is the QK-Norm flag", 'flag="attention_logit"', 'flag!=""'),
    ("observing counts as unprotected", 'mode="observe"', 'mode="never"'),
    ("compiling counts as unprotected", "sentinel_step) >= 0", "sentinel_run_state) >= 0"),
    ("a blind run is protected", "off|blind", "off"),
    ("silence is never broken", "unless on (run) max by (run) (sentinel_run_state)", ""),
    (
        "an older process counts",
        "== max by (run) (last_over_time(sentinel_last_",
        "> 0 * max by (run) (last_over_time(sentinel_last_",
    ),
    ("a moment is enough", "for: 2m", "for: 0s"),
    ("a slow run hangs", "50 * max", "0 * max"),
    (
        "a hang at the first step is missed",
        re.compile(r"\n +or 0 \* max by \(run\) \(sentinel_last_report_timestamp_seconds\)"),
        "",
    ),
    (
        "a run that is over hangs",
        re.compile(r"1800\)\n +and on \(run\) max by \(run\) \(sentinel_run_state.*"),
        "1800)",
    ),
    ("a disk's hiccup is told", "for: 5m", "for: 1m"),
    ("a NaN is looked for in a gauge", "sentinel_nonfinite_steps_total", "sentinel_loss"),
    (
        "a run that went on elsewhere is lost",
        'unless on (run) max by (run) (sentinel_run_state{state="running"}) == 1',
        "",
    ),
]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("about", "found", "instead"), BREAKS, ids=[b[0] for b in BREAKS])
def test_the_cases_notice_when(
    tmp_path: Path, about: str, found: str | re.Pattern[str], instead: str
) -> None:
    text = RULES.read_text(encoding="utf-8")
    broken = text.replace(found, instead) if isinstance(found, str) else found.sub(instead, text)
    assert broken != text, "this break changes nothing any more"
    (tmp_path / "tests").mkdir()
    (tmp_path / RULES.name).write_text(broken, encoding="utf-8")
    shutil.copy(CASES, tmp_path / "tests")
    done = tool("promtool", "prometheus", "test", "rules", tmp_path / "tests" / CASES.name)
    assert done.returncode != 0, about


def test_amtool_takes_the_example() -> None:
    done = tool("amtool", "prometheus-alertmanager", "check-config", ROUTES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_only_a_critical_alert_wakes_somebody(alert: object) -> None:
    severity = getattr(alert, "severity", "")
    done = tool(
        "amtool",
        "prometheus-alertmanager",
        "config",
        "routes",
        "test",
        f"--config.file={ROUTES}",
        f"severity={severity}",
        f"alertname={getattr(alert, 'name', '')}",
    )
    assert done.stdout.strip() == ("pager" if severity == "critical" else "channel"), done.stderr
