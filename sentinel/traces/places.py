"""Where runs lie: $SENTINEL_RUN_DIR, else a folder in the current one.

run_dir()          as the environment says it; trainer and command line ask here
"""

from __future__ import annotations

import os

RUN_DIR_VARIABLE = "SENTINEL_RUN_DIR"
RUN_DIR = "sentinel-runs"


def run_dir() -> str:
    """The folder of runs where nobody names one; relative to the current folder unless set so."""
    return os.environ.get(RUN_DIR_VARIABLE) or RUN_DIR
