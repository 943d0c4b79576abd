"""docs/policy.md names every setting once, with the default that the code has."""

from __future__ import annotations

import re

from sentinel.core.policy import Policy
from tests.support import ROOT

TEXT = (ROOT / "docs" / "policy.md").read_text()


def written() -> dict[str, str]:
    table = TEXT[TEXT.index("## Every other setting") :]
    return dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]*?) \|", table, re.MULTILINE))


def in_code() -> dict[str, str]:
    flat = {}
    for key, value in Policy().to_dict().items():
        if key == "rules":
            continue
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for name, default in inner:
            text = str(default).lower() if isinstance(default, bool) else str(default)
            flat[f"{key}.{name}".rstrip(".")] = text
    return flat


def test_every_setting_is_in_the_reference_with_its_default() -> None:
    assert written() == in_code()


def test_every_rule_is_in_the_reference_with_its_for_and_cooldown() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    rules = Policy().to_dict()["rules"]
    assert {name: (int(f), int(c)) for name, f, c in rows} == {
        name: (rule["for"], rule["cooldown"]) for name, rule in rules.items()
    }
