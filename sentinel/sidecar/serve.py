"""Listening: sockets bound by ourselves, and the server around the application.

    serve(settings, port=8123)            or uds="/run/sentinel/sentinel.sock", or both

uvicorn's own --uds makes the socket 0666 for a moment or for good: here it is bound under a umask,
0660 from the first moment on. A bind that others can reach is refused without a token.

Errors:  ConfigError for an address that cannot be used.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn

from sentinel.core.errors import ConfigError
from sentinel.sidecar.app import create_app
from sentinel.sidecar.direct import Direct, Prompt
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings

logger = logging.getLogger(__name__)

UMASK = 0o117  # leaves 0660
BACKLOG = 1024
MOST_FILES = 65_536


def bind_tcp(host: str, port: int, *, guarded: bool) -> socket.socket:
    """A bound TCP socket.

    Raises:
        ConfigError: the address is not free, or is open to others and nothing guards it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host must be an address of this machine, got {host!r}: {error}"
        ) from error
    family, kind, protocol, _, address = found[0]
    if not guarded and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"host must be a loopback address while there is no token, got {host!r}: whoever "
            "answers a step steers the run; set SENTINEL_TOKEN here and in the trainers, give "
            "--token-file, or use --uds"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def bind_uds(path: str) -> socket.socket:
    """A bound Unix socket of mode 0660; a dead one at that path is replaced.

    Raises:
        ConfigError: something else is there, a live sidecar listens, or the path cannot be made.
    """
    where = Path(path)
    try:
        if where.exists() or where.is_symlink():
            _clear(where)
        where.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the socket {path}: {error}") from error
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(UMASK)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)
    return sock


def _clear(where: Path) -> None:
    if not stat.S_ISSOCK(where.lstat().st_mode):
        raise ConfigError(f"uds must be a path for a socket, but {where} is something else")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(where))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                where.unlink()
            return
        except OSError as error:
            raise ConfigError(f"cannot tell whether {where} is in use: {error}") from error
    raise ConfigError(f"a sidecar listens on {where} already")


def serve(
    settings: Settings,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    uds: str | None = None,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are finished first.

    SIGHUP has the token files read again now, where there are any.

    Args:
        say: told one line when it listens.

    Raises:
        ConfigError: nowhere to listen, or the address cannot be used.
    """
    if port is None and uds is None:
        raise ConfigError("sentinel serve needs --port N or --uds PATH")
    sockets: list[socket.socket] = []
    where: list[str] = []
    try:
        if port is not None:
            tcp = bind_tcp(host, port, guarded=bool(settings.token or settings.token_files))
            sockets.append(tcp)
            name = tcp.getsockname()
            shown = f"[{name[0]}]" if ":" in name[0] else name[0]
            where.append(f"http://{shown}:{name[1]}")
        if uds is not None:
            sockets.append(bind_uds(uds))
            where.append(f"unix://{Path(uds).absolute()}")
        for sock in sockets:
            sock.listen(BACKLOG)
        _allow_many_files()
        app = create_app(settings, clock=time.time, timer=time.perf_counter)  # noqa: TID251 (the shell)
        config = uvicorn.Config(
            Direct(app, app.state.service),
            http=Prompt,
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a forwarded header must not decide who is local
            server_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=600,
            lifespan="on",
        )
        policy = "the trainer's" if settings.policy is None else settings.policy.name
        with _signals_end_quietly():
            service: Service = app.state.service
            serving = _run(
                _Server(config, service),
                sockets,
                lambda: say(
                    f"sentinel listening on {' and '.join(where)} policy={policy} pid={os.getpid()}"
                ),
                # Without token files a SIGHUP ends it, as it ends any command in a terminal.
                (lambda: service.reread()) if settings.token_files else None,
            )
            # Modules live as long as the process: not worth looking at again and again. And states
            # are trees of tuples, thousands a second, none of them in a cycle.
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)
            # Series are read in threads: a decision shall not wait 5 ms for one to let go.
            sys.setswitchinterval(0.0005)
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(serving)
    finally:
        for sock in sockets:
            sock.close()
        if uds is not None and len(sockets) == (port is not None) + 1:
            with suppress(FileNotFoundError):
                os.unlink(uds)


def _allow_many_files() -> None:
    """A run keeps two files open, its trainer two connections: the usual 1,024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: a fifth less CPU time for each report."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return made


class _Server(uvicorn.Server):
    """Tells the service first that it is leaving, so that open streams end by themselves."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.ready = False
        await super().shutdown(sockets)


@contextmanager
def _signals_end_quietly() -> Generator[None]:
    """uvicorn raises the signal again that made it stop: let it end in a handler of ours."""
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _run(
    server: uvicorn.Server,
    sockets: list[socket.socket],
    listening: Callable[[], None],
    hangup: Callable[[], None] | None,
) -> None:
    if hangup is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        listening()
    await serving
