"""Print the constraints file for the environment that runs this: `make pins`."""

from __future__ import annotations

import re
from importlib.metadata import distributions

HEADER = """\
# Exact versions for development and CI: what `make test` runs with. Regenerate with `make pins`.
# torch: the public version only, so that a CPU build (+cpu) and a CUDA build both satisfy it."""

pins = {
    re.sub(r"[-_.]+", "-", d.name).lower(): d.version.split("+")[0].lstrip("v")
    for d in distributions()
    if d.name != "torch-sentinel"
}
print(HEADER)
for name, version in sorted(pins.items()):
    print(f"{name}=={version}")
