"""A real Prometheus on the sidecar: what happened between two scrapes is not lost.

That every query of the dashboard has data and that alerts arrive is in tests/deploy.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sentinel.client import Client
from tests.deploy.test_queries import ReportingTrainer, trainer
from tests.support.prometheus import Prometheus, prometheus
from tests.support.sidecars import serving
from tests.support.simulated import BigGradient, LogitGrowth

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

SPIKE, END = 120, 200


def newest(prom: Prometheus, query: str) -> float | None:
    found = prom.instant(query)
    return float(found[0]["value"][1]) if found else None


def test_a_one_step_spike_between_two_scrapes_is_in_the_query(tmp_path: Path) -> None:
    with (
        serving() as sidecar,
        prometheus(tmp_path, targets={"sentinel": [sidecar.port]}) as prom,
    ):
        run: ReportingTrainer = trainer(
            sidecar.url, "spiky", [BigGradient(SPIKE, 40.0), LogitGrowth(SPIKE, 1, 77.0)]
        )
        run.until(END)
        top = run.steps[SPIKE].observation.grad_norm
        assert top is not None
        assert run.steps[-1].observation.grad_norm < top / 10
        until = time.monotonic() + 30.0
        norm = logit = None
        while time.monotonic() < until and (norm != top or logit != 77.0):
            time.sleep(0.5)
            run.step()
            norm = newest(prom, 'max_over_time(sentinel_grad_norm_window_max{run="spiky"}[1m])')
            logit = newest(
                prom, 'max_over_time(sentinel_attention_max_logit_window_max{run="spiky"}[1m])'
            )
        assert (norm, logit) == (top, 77.0)
        seen = newest(prom, 'max_over_time(sentinel_grad_norm{run="spiky"}[1m])')
        print(f"spike {top:.1f}; the plain gauge saw {seen}")
        skipped = newest(prom, 'sentinel_skipped_steps_total{run="spiky",rule="grad_norm"}')
        assert skipped == 1.0
        (exemplar,) = prom.exemplars('sentinel_skipped_steps_total{run="spiky",rule="grad_norm"}')
        assert exemplar["step"] == str(SPIKE)
        up = newest(prom, "sentinel_sidecar_requests_total{route='steps',status='2xx'}")
        assert up is not None
        assert up >= END
        run.link.close("finished", run.state)
        client = Client(sidecar.url)
        text = client.get("/metrics", deadline_s=10.0).decode()
        client.close()
        assert 'sentinel_run_state{run="spiky",state="finished"} 1.0' in text
