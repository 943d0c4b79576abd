"""The OpenAPI document is complete and true: schemathesis tries every operation against it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks
from starlette.testclient import TestClient

from sentinel.sidecar.app import create_app
from sentinel.sidecar.openapi import document
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire import messages
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import Damage, SimulatedTrainer

EXAMPLES = int(os.environ.get("SENTINEL_FUZZ", "15"))
STREAMS = ("/v1/events", "/v1/runs/{run}/events")


def made() -> FastAPI:
    app = create_app(Settings(token="t"), clock=FakeClock(), timer=lambda: 0.0)
    service: Service = app.state.service
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=3, faults=[Damage(80, 3.0)]))
    reporter.register()
    reporter.steps(100)
    service.ready = True
    return app


@pytest.fixture(scope="module", autouse=True)
def app() -> Iterator[FastAPI]:
    """Made when the first test of this module runs, not when it is collected."""
    yield the_app()
    the_app().state.service.close()


the_app = cache(made)


async def living(scope: Any, receive: Any, send: Any) -> None:
    """The application, which does not end with each call."""
    if scope["type"] != "lifespan":
        await the_app()(scope, receive, send)
        return
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


@schemathesis.serializer(messages.CONTENT_TYPE)
def raw(context: Any, value: Any) -> bytes:
    """A trainer's message: not sealed, so refused; test_fuzz.py has those that are."""
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else msgspec.msgpack.encode(data)


SCHEMA = schemathesis.openapi.from_dict(document("1"))
SCHEMA.app = living


def operations(routes: Any) -> set[tuple[str, str]]:
    """What the application really has; newer FastAPI keeps included routers as they are."""
    found: set[tuple[str, str]] = set()
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            found |= operations(inner.routes)
        elif getattr(route, "include_in_schema", True):
            found |= {(route.path, method.lower()) for method in route.methods - {"HEAD"}}
    return found


def test_the_document_has_every_operation_and_no_other(app: FastAPI) -> None:
    written = {(path, method) for path, item in document("1")["paths"].items() for method in item}
    assert written == operations(app.routes)


@SCHEMA.exclude(path=list(STREAMS)).parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.slow
def test_every_operation_answers_as_the_document_says(case: Any) -> None:
    # The headers of somebody with a token; sometimes schemathesis leaves them out by itself.
    response = case.call(headers={"authorization": "Bearer t"})
    case.validate_response(
        response,
        checks=[
            checks.not_a_server_error,
            checks.CHECKS.get_one("status_code_conformance"),
            checks.CHECKS.get_one("content_type_conformance"),
            checks.CHECKS.get_one("response_schema_conformance"),
        ],
    )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("get", "", None),
        ("get", "/{run}", None),
        ("get", "/{run}/snapshots", None),
        ("get", "/{run}/incidents", None),
        ("get", "/{run}/decisions", None),
        ("get", "/{run}/series", None),
        ("get", "/{run}/layers", None),
        ("post", "/{run}/commands", {"kind": "rollback"}),
    ],
)
def test_the_answers_of_a_run_that_there_is_are_as_the_document_says(
    app: FastAPI, method: str, path: str, body: Any
) -> None:
    # Schemathesis makes names up, of which there are hardly any runs.
    client = TestClient(app, headers={"authorization": "Bearer t"})
    got = client.request(method, "/v1/runs" + path.format(run="r"), json=body)
    written = document("1")
    answers = written["paths"]["/v1/runs" + path][method]["responses"][str(got.status_code)]
    assert got.status_code < 300, got.text
    schema = answers["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(schema | {"components": written["components"]}).validate(
        got.json()
    )
    if path == "/{run}":
        assert got.json()["snapshots"]


def test_a_trainer_in_another_language_needs_json_only() -> None:
    app = made()
    client = TestClient(app, headers={"authorization": "Bearer t"})
    assert client.put("/v1/runs/go", json={"layers": ["a", "b"]}).status_code == 200
    answer = client.post(
        "/v1/runs/go/steps",
        json={
            "step": 0,
            "loss": 3.0,
            "grad_norm": "nan",
            "columns": {"layer_grad_norm": [1, "inf"]},
        },
    ).json()
    assert answer["decision"]["action"] == "skip_step"
    said = {"step": 0, "executed": "skip_step", "applied": False}
    answer = client.post(
        "/v1/runs/go/steps",
        json={"observation": {"step": 1, "loss": 3.0, "grad_norm": 1.0}, "outcome": said},
    ).json()
    assert answer["decision"]["action"] == "proceed"
    wrong = client.post(
        "/v1/runs/go/steps", json={"step": 2, "columns": {"layer_grad_norm": [1.0]}}
    )
    assert wrong.status_code == 422
    assert "2 layers" in wrong.json()["detail"]
    assert client.post("/v1/runs/go/close", json={"state": "finished"}).json() == {
        "run": "go",
        "state": "finished",
    }
    about = client.get("/v1/runs/go").json()
    assert (about["state"], about["record"]["frames"]) == ("finished", 2)
    series = client.get("/v1/runs/go/series?name=grad_norm,action").json()["series"]
    assert series["grad_norm"]["value"] == ["nan", 1.0]
    assert series["action"]["value"] == ["skip_step", "proceed"]
    app.state.service.close()
