"""A report that makes no sense keeps no later one from the record: the trainer's link as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.client import MissError
from sentinel.core.errors import ProtocolError
from sentinel.sidecar.app import create_app
from sentinel.sidecar.runs import RefusedError, details
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire.messages import Accepted, Close, HandOver, Register, Registered, Reply, Steps
from sentinel_hooks import link as link_module
from tests.hooks.test_link import POLICY, Loop
from tests.support import FakeClock
from tests.support.waits import until


class Client:
    """sentinel.client.Client, without a network: it asks the service at once."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.lock = threading.Lock()

    def _call(self, what: str, message: Any) -> Any:
        with self.lock:
            try:
                return getattr(self.service.runs, what)(message, self.service.now())
            except RefusedError as error:
                code = error.code if error.code in ("unknown_run", "fenced") else "refused"
                raise MissError(code, error.detail) from error
            except ProtocolError as error:
                raise MissError("refused", str(error)) from error

    def resolve(self, *, anew: bool = False) -> None:
        pass

    def share(self, other: object) -> None:
        pass

    def close(self) -> None:
        pass

    def register(self, message: Register, *, deadline_s: float) -> Registered:
        found: Registered = self._call("register", message)
        return found

    def post_steps(self, message: Steps, *, deadline_s: float) -> Reply:
        found: Reply = self._call("steps", message)
        return found

    def put_state(self, message: HandOver, *, deadline_s: float) -> Accepted:
        self._call("hand_over", message)
        return Accepted(run="r")

    def post_close(self, message: Close, *, deadline_s: float) -> Accepted:
        self._call("close", message)
        return Accepted(run="r")


@pytest.fixture
def service() -> Iterator[Service]:
    found: Service = create_app(Settings(), clock=FakeClock(), timer=lambda: 0.0).state.service
    yield found
    found.close()


def test_the_steps_after_a_report_that_is_refused_are_recorded_and_decided(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(service)
    monkeypatch.setattr(link_module, "Client", lambda *_, **__: client)
    link = link_module.make_link("http://127.0.0.1:1", "sidecar", run="r", incarnation="i",
                                 policy=POLICY)  # fmt: skip
    try:
        loop = Loop(link)
        for _ in range(5):
            loop.step()
        loop.step(loss_scale=-1.0)  # a broken probe
        for _ in range(5):
            loop.step()
        until(lambda: link.status().buffered == 0, 20.0)
        for _ in range(3):
            decided_by = loop.step()[1]
        assert str(decided_by) == "sidecar"
        about = details(service.runs.get("r"), service.now())
        assert about["missing_reports"] == [(5, 5)]
        assert about["refused_reports"] == 1
        assert about["record"]["frames"] == 13
        assert caplog.text.count("refuses reports that make no sense run=r reports=1") == 1
        assert "loss_scale" in caplog.text
    finally:
        link.close()
