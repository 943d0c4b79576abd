"""The documents hold: runnable examples run, and what they tell people to type exists.

A python block whose first line is `# runs` is executed, alone, in an empty folder. In every
document, `sentinel COMMAND` and `make TARGET` in code must exist, and links to files too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT, require

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str, *languages: str) -> list[str]:
    """Bodies of the fenced blocks in one of `languages`."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def runnable(text: str) -> list[str]:
    return [body for body in blocks(text, "python") if body.startswith("# runs")]


def typed(text: str, program: str) -> set[str]:
    """First words after `program` in inline code and in shell blocks."""
    prose = FENCE.sub("", text)
    shell = blocks(text, "", "sh", "bash", "console", "shell")
    code = [*re.findall(r"`([^`\n]+)`", prose), *"\n".join(shell).splitlines()]
    words = (
        re.match(rf"(?:\$ )?(?:\S+=\S+ )*{program} ([a-z][a-z0-9-]*)", c.strip()) for c in code
    )
    return {found[1] for found in words if found}


def test_what_counts_as_an_example_and_as_a_command() -> None:
    text = (
        "Say `sentinel serve --port 1` or `make test`; `sentinel` alone is no command.\n"
        "```python\n# runs\nx = 1\n```\n```python\nnot_run()\n```\n"
        "```sh\n$ sentinel replay RUN\nSENTINEL_REQUIRE_ALL=1 make test-full\n```\n"
    )
    assert runnable(text) == ["# runs\nx = 1\n"]
    assert typed(text, "sentinel") == {"serve", "replay"}
    assert typed(text, "make") == {"test", "test-full"}


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_examples_of_a_document_run(path: Path, tmp_path: Path) -> None:
    for number, code in enumerate(runnable(path.read_text(encoding="utf-8"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{path.name}:\n{code}\n{done.stdout}{done.stderr}"


@cache
def help_of(command: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("sentinel")
    require(program.is_file(), "the `sentinel` script (install the package)")
    return subprocess.run([program, command, "--help"], capture_output=True, text=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_that_a_document_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for command in sorted(typed(text, "sentinel")):
        done = help_of(command)
        assert done.returncode == 0, f"sentinel {command}: {done.stdout}{done.stderr}"
        assert command in done.stdout.split("\n\n")[0], f"sentinel {command} has no help of its own"
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert typed(text, "make") <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_document_links_to_exists(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    links = [x.split("#")[0] for x in re.findall(r"\]\(([^)\s]+)\)", text)]
    files = [x for x in links if x and not re.match(r"[a-z]+:", x)]
    assert [x for x in files if not (path.parent / x).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_of_the_code_that_a_document_names_exists(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    named = re.findall(r"`((?:sentinel|hooks|tests|docs|\.ci)/[\w./-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
