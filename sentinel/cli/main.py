"""Entry point of the `sentinel` command."""

from __future__ import annotations

from sentinel import __version__


def main() -> int:
    """Run the command line; returns the exit status."""
    print(f"sentinel {__version__}")
    return 0
