"""`sentinel.attach` is the one door to torch, and it says so when torch is not there."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import sentinel
from tests.support import ROOT

NO_TORCH = "import sys; sys.modules['torch'] = None; import sentinel; sentinel.attach(object())"


def test_attach_without_torch_names_the_way_out() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: sentinel.attach() runs in the training process")
    assert last.endswith("pip install 'torch-sentinel[hooks]'")


def test_importing_sentinel_loads_no_torch() -> None:
    code = "import sys, sentinel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_version_is_the_one_that_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sentinel.__version__ == project["version"]
