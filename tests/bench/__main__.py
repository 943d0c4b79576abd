"""`make bench`: print every cost table; a person reads them, no test asserts them.

python -m tests.bench            all of them
python -m tests.bench engine     only bench_engine
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(names: list[str]) -> None:
    """Run the main() of each bench_*.py, or of the named ones."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    for name in found:
        if not names or name.removeprefix("bench_") in names:
            importlib.import_module(f"tests.bench.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
