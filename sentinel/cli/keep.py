"""Grafana, for `sentinel serve`: marks for what was done, and dashboards kept as they should be.

    add_options(parser)                  --grafana-url, --grafana-token-file, ...
    grafana = grafana_from(options)      None where no Grafana is named

Errors:  ConfigError for half a configuration, GrafanaError without grafana-api.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import TYPE_CHECKING

from sentinel.cli.failing import UsageError
from sentinel.dashboards import alerts
from sentinel.dashboards import push as pushing
from sentinel.dashboards.annotate import AnnotationWriter, connector
from sentinel.dashboards.grafana import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE
from sentinel.dashboards.reconcile import Port, Reconciler

if TYPE_CHECKING:
    from sentinel.sidecar.grafana import Grafana

EVERY_MIN = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `sentinel serve` is asked about Grafana."""
    group = parser.add_argument_group("Grafana (pip install 'torch-sentinel[grafana]')")
    group.add_argument(
        "--grafana-url",
        default="",
        metavar="URL",
        help=f"marks skips and rollbacks there, and keeps the dashboards (${URL_VARIABLE})",
    )
    group.add_argument(
        "--grafana-token-file",
        default="",
        metavar="FILE",
        help=f"of a service account, role Editor (${TOKEN_FILE_VARIABLE}, ${TOKEN_VARIABLE})",
    )
    group.add_argument(
        "--grafana-every",
        type=float,
        default=EVERY_MIN,
        metavar="MIN",
        help="minutes between two looks at the dashboards (%(default)g); 0: marks only",
    )
    group.add_argument(
        "--grafana-overwrite",
        action="store_true",
        help="put back what was changed by hand, too",
    )
    group.add_argument(
        "--grafana-alerts",
        action="store_true",
        help="keep the alert rules as well: not where Prometheus has them",
    )
    group.add_argument("--grafana-folder", default=alerts.FOLDER, metavar="UID", help="%(default)s")
    group.add_argument(
        "--grafana-datasource", metavar="UID", help="Prometheus, if there are several"
    )
    group.add_argument(
        "--grafana-runbooks", default="", metavar="URL", help="where docs/operating.md is read"
    )


def grafana_from(options: argparse.Namespace) -> Grafana | None:
    """The Grafana that the options or the environment name; None where they name none.

    Raises:
        ConfigError: a URL without a usable token, or an option that makes no sense.
        GrafanaError: grafana-api is not installed.
        PushError: the dashboards are not there.
    """
    from sentinel.sidecar.grafana import Grafana

    every = options.grafana_every
    if not (math.isfinite(every) and (every == 0.0 or every >= 0.1)):
        raise UsageError(f"--grafana-every must be 0 or at least 0.1 minutes, got {every:g}")
    connect = connector(os.environ, url=options.grafana_url, token_file=options.grafana_token_file)
    if connect is None:
        return None
    writer = AnnotationWriter(connect)
    if not every:
        return Grafana(writer)
    boards = pushing.dashboards()

    def want(port: Port) -> pushing.Wanted:
        datasource = None
        if options.grafana_alerts:
            datasource = options.grafana_datasource or pushing.only_source(port)
        return pushing.wanted(
            boards,
            folder=options.grafana_folder,
            runbooks=options.grafana_runbooks,
            datasource=datasource,
        )

    keeper = Reconciler(connect, want, timer=time.perf_counter, overwrite=options.grafana_overwrite)
    return Grafana(writer, keeper, every * 60.0)
