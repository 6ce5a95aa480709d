"""The way in: `flatmin`, or `python -m flatmin_lab`; where a package is missing, a line that says how to get it."""

import sys

from flatmin_lab.extras import need

NEEDED = ("typer", "rich", "numpy", "safetensors", "jinja2", "matplotlib")


def main() -> None:
    try:
        for package in NEEDED:
            need(package, "the command flatmin")
    except ImportError as error:
        sys.exit(f"flatmin: {error}")
    need("flatmin_lab.cli", "the command flatmin").app()


if __name__ == "__main__":
    main()
