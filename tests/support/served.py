"""A sidecar in this process, on a Unix socket: for what has to look into it while it serves.

with served(app, tmp_path / "s.sock") as url: cli.main(["runs", "--sidecar", url])
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from sentinel.sidecar.serve import bind_uds


@contextmanager
def served(app: FastAPI, path: Path) -> Iterator[str]:
    """Its URL; the application is closed at the end."""
    with bind_uds(str(path)) as sock:
        sock.listen(16)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        try:
            yield f"unix://{path}"
        finally:
            server.should_exit = True
            thread.join(20)
