"""Every refusal has one shape: {"code", "detail"}, whatever it is that refuses."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import sentinel.sidecar
from sentinel.sidecar import door
from sentinel.sidecar.openapi import CODES, PATHS
from sentinel.sidecar.routes import read
from sentinel.sidecar.store.database import StoreError
from sentinel.wire import messages
from tests.sidecar.test_app import Trainer, run, sidecar

JSON = {"content-type": "application/json"}


def shape(got: httpx.Response) -> tuple[int, str, str]:
    """(status, code, detail) of a refusal in the one shape there is."""
    assert got.headers["content-type"] == "application/json", got.text
    said = json.loads(got.content)
    assert set(said) == {"code", "detail"}
    assert said["code"] in CODES
    assert said["detail"]
    assert got.headers["x-content-type-options"] == "nosniff"
    return got.status_code, said["code"], said["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "said"),
    [
        ("GET", "/v1/nothing", 404, "not_found", "there is nothing at '/v1/nothing'"),
        ("GET", "/v1/runs/", 404, "not_found", "GET /openapi.json"),
        ("GET", "/assets/../app.py", 404, "not_found", ""),
        ("GET", "/assets/app.py", 404, "not_found", "the page has no file"),
        ("GET", "/v1/runs/none", 404, "unknown_run", "not registered"),
        ("DELETE", "/v1/runs/r", 405, "method_not_allowed", "only PUT and GET"),
        ("PUT", "/metrics", 405, "method_not_allowed", "only GET"),
        ("POST", "/", 405, "method_not_allowed", "only GET"),
        ("GET", "/v1/runs/r/steps", 405, "method_not_allowed", "only POST"),
        ("GET", "/v1/runs/r/series?points=x", 422, "malformed", "points must be a whole number"),
        (
            "GET",
            "/v1/runs/r/series?from=5&to=3",
            422,
            "malformed",
            "from must be at most to (3), got 5: both are steps and both are included; swap them",
        ),
        ("GET", "/v1/runs/r/layers?from=5&to=3", 422, "malformed", "or leave one out"),
    ],
)
def test_what_is_not_there_or_not_taken(
    method: str, path: str, status: int, code: str, said: str
) -> None:
    async def test() -> None:
        async with sidecar() as at:
            await Trainer(at).register()
            got = await at.tcp.request(method, path)
            found = shape(got)
            assert found[:2] == (status, code)
            assert said in found[2]
            if status == 405:
                allowed = got.headers["allow"]
                assert method not in allowed
                taken = said.removeprefix("only ").replace(" and ", ", ")
                assert allowed == (f"{taken}, HEAD" if "GET" in taken else taken)

    run(test)


def test_head_answers_as_get_does_without_the_body() -> None:
    async def test() -> None:
        async with sidecar() as at:
            await Trainer(at).register()
            for path in ("/v1/runs", "/v1/runs/r", "/healthz", "/metrics", "/v1/runs/none", "/"):
                got, whole = await at.tcp.head(path), await at.tcp.get(path)
                assert (got.status_code, got.content) == (whole.status_code, b""), path
                assert got.headers["content-type"] == whole.headers["content-type"]
                assert whole.content
            assert (await at.tcp.head("/v1/events")).status_code == 405  # it would never end

    run(test)


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "code"),
    [
        ("/v1/runs/r/steps", {"content-type": "text/csv"}, b"1,2", 415, "malformed"),
        ("/v1/runs/r/steps", JSON, b"x" * 5000, 413, "malformed"),
        ("/v1/runs/r/steps", JSON, b"{", 422, "malformed"),
        ("/v1/runs/r/commands", JSON, b"x" * 5000, 413, "malformed"),
    ],
)
def test_a_body_that_cannot_be_taken(
    path: str, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    async def test() -> None:
        async with sidecar(max_body_bytes=4096) as at:
            got = await at.uds.post(path, content=body, headers=headers)
            assert shape(got)[:2] == (status, code)

    run(test)


@pytest.mark.parametrize("kind", ["application/json", messages.CONTENT_TYPE])
def test_a_report_of_more_than_8_mib_is_not_read(kind: str) -> None:
    async def test() -> None:
        async with sidecar() as at:
            body = b" " * (door.MOST_REPORT_BYTES + 1)
            headers = {"content-type": kind}
            got = await at.uds.post("/v1/runs/r/steps", content=body, headers=headers)
            assert (got.status_code, b"8388608 bytes" in got.content) == (413, True)
            # A state may be larger: this one is read, and is none.
            got = await at.uds.put("/v1/runs/r/state", content=body, headers=headers)
            assert got.status_code == 400

    run(test)


def test_too_many_says_when_it_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "REQUESTS_AT_ONCE", 1)

    async def test() -> None:
        async with sidecar() as at:
            assert (await at.tcp.get("/v1/runs")).status_code == 200
            got = await at.tcp.get("/v1/runs")
            assert shape(got)[:2] == (429, "too_many")
            assert int(got.headers["retry-after"]) >= 1

    run(test)


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (StoreError("no database"), 503, "unavailable"),
        (OSError(28, "No space left on device"), 503, "unavailable"),
        (KeyError("secret-text"), 500, "internal"),
    ],
)
def test_trouble_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(read, "_whole", broken)

    async def test() -> None:
        async with sidecar() as at:
            await Trainer(at).register()
            found = shape(await at.tcp.get("/v1/runs/r/series"))
            assert found[:2] == (status, code)
            assert "secret-text" not in found[2]

    with caplog.at_level(logging.ERROR):
        run(test)
    assert ("request failed method=GET path=/v1/runs/r/series" in caplog.text) == (status == 500)


def test_a_sidecar_that_is_not_ready() -> None:
    async def test() -> None:
        async with sidecar() as at:
            at.app.state.service.ready = False
            assert shape(await at.tcp.get("/readyz"))[:2] == (503, "not_ready")

    run(test)


def test_a_trainer_is_refused_in_its_own_language() -> None:
    async def test() -> None:
        async with sidecar() as at:
            got = await at.tcp.post(
                "/v1/runs/r/steps",
                content=b"\x80",
                headers={"content-type": messages.CONTENT_TYPE},
            )
            said = messages.decode_message(messages.Refused, got.content)
            assert (got.status_code, said.code) == (400, "garbled")

    run(test)


def test_every_code_is_in_the_document_and_every_documented_one_is_used() -> None:
    found: set[str] = set()
    for path in Path(sentinel.sidecar.__file__).parent.rglob("*.py"):
        if path.name != "openapi.py":
            text = path.read_text()
            found |= set(re.findall(r'(?:RefusedError|error)\(\s*(?:\d+, )?"([a-z_]+)"', text))
            found |= set(re.findall(r'__init__\("([a-z_]+)"', text))
            found |= set(re.findall(r'code="([a-z_]+)"', text))
            found |= set(re.findall(r'\d{3}: "([a-z]+_[a-z_]+)"', text))
            found |= set(re.findall(r'" if \w+ else "([a-z_]+)",$', text, re.MULTILINE))
    assert found == set(CODES)


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in PATHS.items():
        for method, operation in item.items():
            yield f"{method} {path}", operation


def test_every_operation_documents_its_refusals_in_that_shape() -> None:
    for name, operation in operations():
        refusals = {c: r for c, r in operation["responses"].items() if int(c) >= 400}
        assert {"405", "500", "503"} <= set(refusals), name
        for refusal in refusals.values():
            shaped = refusal["content"]["application/json"]["schema"]
            assert shaped == {"$ref": "#/components/schemas/Refusal"}


def test_nobody_is_sent_elsewhere_by_a_host_name_of_their_choice() -> None:
    async def test() -> None:
        async with sidecar() as at:
            got = await at.tcp.get("/v1/runs/", headers={"host": "evil.example"})
            assert got.status_code == 404
            assert "location" not in got.headers

    run(test)
