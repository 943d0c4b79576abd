"""A real Chromium, and what a page did in it.

    with browsing() as browser:
        with opened(browser, url, width=390, dark=True) as seen:
            seen.page.goto(url)
            seen.problems()      console errors, CSP violations, failed and outside requests

Needs Debian's `chromium` and a font (.ci/run installs them); a test without it skips.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.support import require

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_MS = 60_000


@contextmanager
def browsing() -> Iterator[Any]:
    """A Chromium without a window."""
    chromium = shutil.which("chromium")
    require(chromium is not None, "chromium (Debian: apt-get install chromium fonts-dejavu-core)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """One page, and the log of what it did."""

    page: Any
    origin: str
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    bad_answers: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Everything that a person would call an error; empty when all is well."""
        outside = [url for url in self.requests if not url.startswith(self.origin)]
        violated = self.page.evaluate("window.violated ?? []")
        return [
            *self.console,
            *(f"outside request: {url}" for url in outside),
            *(f"violates the policy: {what}" for what in violated),
            *self.bad_answers,
        ]


@contextmanager
def opened(
    browser: Any,
    url: str,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    touch: bool = False,
) -> Iterator[Seen]:
    """A page of its own, with the log running; nothing is opened yet.

    Args:
        touch: a finger and no mouse, as on a phone: locator.tap().
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        has_touch=touch,
        is_mobile=touch,
    )
    context.set_default_timeout(TIMEOUT_MS)
    context.add_init_script(
        "window.violated = [];"
        "document.addEventListener('securitypolicyviolation', e =>"
        " window.violated.push(`${e.violatedDirective} ${e.blockedURI} ${e.sourceFile}`));"
    )
    page = context.new_page()
    parts = urlsplit(url)
    seen = Seen(page, f"{parts.scheme}://{parts.netloc}/")
    page.on(
        "console",
        lambda m: m.type in ("error", "warning") and seen.console.append(f"{m.type}: {m.text}"),
    )
    page.on("pageerror", lambda e: seen.console.append(f"page error: {e}"))
    page.on("request", lambda r: seen.requests.append(r.url))
    page.on(
        "response",
        lambda r: r.status >= 400 and seen.bad_answers.append(f"{r.status} {r.request.url}"),
    )
    try:
        yield seen
    finally:
        page.unroute_all(behavior="ignoreErrors")  # an answer that is still under way
        context.close()
