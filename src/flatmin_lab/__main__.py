"""The entry point: `flatmin`, or `python -m flatmin_lab`. If a package is missing, one line says how to install it."""

import sys

from flatmin_lab.system.optional_deps import need

NEEDED = ("typer", "rich", "numpy", "safetensors")


def main() -> None:
    try:
        overview = need("flatmin_lab.cli.overview", "the command flatmin")
        if overview.answer(sys.argv[1:]):
            return
        for package in NEEDED:
            need(package, "the command flatmin")
        app = need("flatmin_lab.cli.app", "the command flatmin").app
    except ImportError as error:
        sys.exit(f"flatmin: {error}")
    except KeyboardInterrupt:  # during the imports
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
