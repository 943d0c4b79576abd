"""The page at `/`: a shell without any data, and the modules that fill it from the API.

    routes = router(service)

The shell is the same for everybody and holds nothing of any run, so it needs no token; what it
shows it asks the API for, with the token that a person typed in. Style and scripts are files of
their own, so that the Content-Security-Policy allows nothing inline and nothing from outside, and
the scripts build elements and text only: `require-trusted-types-for` makes a browser refuse HTML
that is put together from strings, whatever a run or a layer is called.

Files are read once, at the start, and answered with an ETag: a browser asks each time, and gets an
empty 304 until the package changes.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from sentinel import __version__
from sentinel.sidecar.security import PAGE_POLICY
from sentinel.sidecar.service import Service
from sentinel.sidecar.unserved import error

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="3" fill="#0b5394"/>'
    '<path d="M1 9h3l2-6 3 10 2-6 1 2h3" fill="none" stroke="#fff" stroke-width="1.6"/></svg>'
)


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes = APIRouter()
    shell, assets = _load()

    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, shell, (("content-security-policy", PAGE_POLICY),))

    @routes.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        found = assets.get(name)
        if found is None:
            return error(404, "not_found", f"the page has no file {name[:64]!r}")
        return _answer(request, found)

    return routes


_File = tuple[bytes, str, str]  # body, content type, ETag


def _load() -> tuple[_File, dict[str, _File]]:
    assets: dict[str, _File] = {"icon.svg": _file(ICON.encode(), "image/svg+xml")}
    shell: _File | None = None
    for item in files(__package__).iterdir():
        kind = KINDS.get(item.name[item.name.rfind(".") :])
        if kind is None:
            continue
        body = item.read_bytes()
        if item.name == "index.html":
            shell = _file(body.replace(b"{{version}}", __version__.encode()), kind)
        else:
            assets[item.name] = _file(body, kind)
    assert shell is not None, "index.html is part of the package"
    return shell, assets


def _file(body: bytes, kind: str) -> _File:
    return body, kind, f'"{blake2b(body, digest_size=12).hexdigest()}"'


def _answer(request: Request, file: _File, more: tuple[tuple[str, str], ...] = ()) -> Response:
    body, kind, tag = file
    headers = {"etag": tag, "cache-control": "no-cache", "content-type": kind, **dict(more)}
    if request.headers.get("if-none-match") == tag:
        del headers["content-type"]
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)
