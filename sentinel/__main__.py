"""`python -m sentinel` is the `sentinel` command."""

from sentinel.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
