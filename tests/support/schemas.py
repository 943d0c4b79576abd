"""The official JSON schemas, which lie beside the checkout: what does Grafana really take?

    grafana = grafana_schemas()                  skips the test where they are not there
    grafana.dashboard(board)                     list of complaints; empty when it is right

A panel's options and custom field settings are not part of the dashboard's own schema; they are
checked against the schema of their panel type, each query against that of its data source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator

from tests.support import require, shared_dir


class GrafanaSchemas:
    """The schemas in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[tuple[str, str], Draft7Validator] = {}

    def complaints(self, file: str, value: Any, definition: str = "") -> list[str]:
        """What a schema has against a value."""
        key = (file, definition)
        if key not in self._read:
            path = self._folder / f"{file}.jsonschema.json"
            schema = json.loads(path.read_text(encoding="utf-8"))
            if file == "dashboard":
                # "Any" became "object" there: a matcher such as byName takes a plain string.
                schema["definitions"]["MatcherConfig"]["properties"]["options"] = {}
            if definition:
                if definition not in schema["definitions"]:
                    raise KeyError(f"{path.name} has no {definition}")
                schema["$ref"] = f"#/definitions/{definition}"
            self._read[key] = Draft7Validator(schema)
        found = self._read[key].iter_errors(value)
        return [f"{file} {error.json_path}: {error.message[:300]}" for error in found]

    def dashboard(self, board: dict[str, Any]) -> list[str]:
        """A whole dashboard with its panels and queries."""
        found = self.complaints("dashboard", board)
        for panel in _panels(board):
            kind = panel["type"].replace("-", "")
            if kind == "row":
                continue
            found += self.complaints(kind, panel.get("options", {}), "Options")
            custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
            if custom is not None:
                found += self.complaints(kind, custom, "FieldConfig")
            for target in panel.get("targets", []):
                found += self.complaints("prometheus", target)
        return found

    def rule_group(self, group: dict[str, Any]) -> list[str]:
        """An alert rule group as the provisioning API takes it."""
        found = self.complaints("alerting", group, "RuleGroup")
        for rule in group.get("rules", []):
            for query in rule.get("data", []):
                model = query.get("model", {})
                if query.get("datasourceUid") == "__expr__":
                    if model.get("type") not in ("threshold", "reduce", "math", "resample"):
                        found.append(f"expression of type {model.get('type')!r}")
                else:
                    found += self.complaints("prometheus", model)
        return found


def _panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board.get("panels", []):
        yield panel
        yield from panel.get("panels", [])


@cache
def schemas_folder(name: str) -> Path:
    """`shared/schemas/<name>`, or a skip."""
    folder = shared_dir() / "schemas" / name
    require(folder.is_dir(), f"schemas at {folder} (set SENTINEL_SHARED)")
    return folder


def grafana_schemas() -> GrafanaSchemas:
    """The Grafana schemas; skips the test where they are not there."""
    return GrafanaSchemas(schemas_folder("grafana"))
