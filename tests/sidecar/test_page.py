"""The page's files: what is served, under which policy, and that nothing comes from outside."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.resources import files
from typing import Any

import pytest

from sentinel import __version__
from sentinel.core.policy import Rules
from tests.sidecar.test_app import run, sidecar

PAGE = files("sentinel.sidecar.page")
TEXTS = {f.name: f.read_text() for f in PAGE.iterdir() if f.name.endswith((".html", ".css", ".js"))}


def get(path: str, **headers: str) -> Any:
    found: list[Any] = []

    async def test() -> None:
        async with sidecar(token="a-token-for-everybody") as at:
            found.append(await at.tcp.get(path, headers=headers))

    run(test)
    return found[0]


def test_the_shell_needs_no_token_and_holds_no_data() -> None:
    got = get("/")
    assert got.status_code == 200
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert f"sentinel {__version__}" in got.text
    assert "{{" not in got.text


def test_the_policy_lets_nothing_inline_and_nothing_from_outside() -> None:
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in get("/").headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[k] for k in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy)


@pytest.mark.parametrize("path", ["/", "/assets/app.js", "/v1/runs", "/metrics", "/none"])
def test_every_answer_carries_the_security_headers(path: str) -> None:
    headers = get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "default-src 'none'" in headers["content-security-policy"]


def test_data_is_never_cached_and_files_are_asked_for_again() -> None:
    assert get("/v1/runs").headers["cache-control"] == "no-store"
    first = get("/assets/style.css")
    assert first.headers["cache-control"] == "no-cache"
    again = get("/assets/style.css", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["..%2fapp.py", "__init__.py", "none.js", "%00", "index.html"])
def test_nothing_but_the_pages_own_files_is_served(name: str) -> None:
    assert get(f"/assets/{name}").status_code == 404


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_file_asks_for_anything_outside(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text)
    assert "innerHTML" not in text
    assert "eval(" not in text


def test_what_the_files_import_is_there() -> None:
    wanted = {
        found
        for text in TEXTS.values()
        for found in re.findall(r'(?:from "\./|="assets/)([\w.]+)"', text)
    } - {"icon.svg"}
    assert wanted <= set(TEXTS)
    assert set(TEXTS) - wanted == {"index.html"}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_is_asked_for_from_the_root_so_that_a_proxy_may_give_it_a_path(name: str) -> None:
    text = TEXTS[name]
    assert not re.findall(r'(?:href|src)="/|from "/', text)
    assert not re.findall(r"(?<!#)\bfetch\((?!here\()", text)


def test_no_style_and_no_handler_is_inline() -> None:
    assert not re.findall(r"\sstyle=|\son\w+=|<script>|<style", TEXTS["index.html"])


FLAGS = [f.name for f in fields(Rules)]
FLAGS = FLAGS[FLAGS.index("level_shift") :]


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_has_a_title_and_first_steps(flag: str) -> None:
    assert re.search(rf'^  {flag}: "[A-Z]', TEXTS["words.js"], re.MULTILINE)
    if flag != "level_shift":  # stands with what was acted on
        assert re.search(
            rf'^  {flag}: {{\n    means: ".+",\n    steps: \[', TEXTS["todo.js"], re.MULTILINE
        )
