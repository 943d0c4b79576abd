"""python -m tests.mutants [WORD ...]: try every mutant whose name holds one of the words, or all.

Prints one line each; the exit status is 1 when one survived.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutants.catalog import MUTANTS
from tests.mutants.run import try_mutant


def main(words: list[str]) -> int:
    """Try them one after the other."""
    names = [n for n in MUTANTS if not words or any(word in n for word in words)]
    survived = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            result = try_mutant(name, Path(folder))
        if not result.killed_by:
            survived.append(name)
        verdict = f"red    {result.killed_by}" if result.killed_by else "GREEN  survived"
        print(f"{result.seconds:5.1f} s  {verdict:<110}  {name}", flush=True)
    print(f"{len(names) - len(survived)} of {len(names)} turned a test red")
    return 1 if survived or not names else 0


sys.exit(main(sys.argv[1:]))
