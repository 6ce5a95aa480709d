"""The way in: `flatmin`, or `python -m flatmin_lab`; where a package is missing, a line that says how to get it."""

import sys

from flatmin_lab.system.optional_deps import need

NEEDED = ("typer", "rich", "numpy", "safetensors")


def main() -> None:
    try:
        for package in NEEDED:
            need(package, "the command flatmin")
        app = need("flatmin_lab.cli.app", "the command flatmin").app
    except ImportError as error:
        sys.exit(f"flatmin: {error}")
    except KeyboardInterrupt:  # while all is imported
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
