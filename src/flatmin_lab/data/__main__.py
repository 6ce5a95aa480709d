"""What is in a data set: `python -m flatmin_lab.data cifar10 --root data [--download]`."""

import argparse
import sys
from pathlib import Path
from time import perf_counter

from rich.console import Console

from flatmin_lab.data import DATA_SETS, Dataset, Normalisation, load
from flatmin_lab.data.formats.download_progress import download_bar


def describe(data: Dataset, seconds: float) -> str:
    """A few lines about a data set: sizes, statistics, classes, checksum."""
    statistics = Normalisation.of(data.train)
    scale = 255 if data.train.is_images else 1
    counts = {
        which: split.y.bincount(minlength=data.num_classes)
        for which, split in (("train", data.train), ("test", data.test))
    }
    size = sum(split.x.nbytes + split.y.nbytes for split in (data.train, data.test))

    def numbers(values: list[float]) -> str:
        return " / ".join(f"{value:.4g}" for value in values[:8]) + (" …" if len(values) > 8 else "")

    lines = [
        f"{data.name}: {len(data.train)} for training, {len(data.test)} for testing, "
        f"{data.train.kind}, {data.num_classes} classes, from {data.source}",
        f"read in {seconds:.2f} s, {size / 1e6:.0f} MB",
        f"mean {numbers((statistics.mean * scale).tolist())}, "
        f"standard deviation {numbers((statistics.std * scale).tolist())}",
    ]
    for which, count in counts.items():
        low, high = int(count.min()), int(count.max())
        each = f"{low} of each class" if low == high else f"{low} to {high} of a class"
        listed = "" if low == high or data.num_classes > 20 else ": " + ", ".join(map(str, count.tolist()))
        lines.append(f"{which}: {each}{listed}")
    return "\n".join([*lines, f"sha256 {data.checksum}"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flatmin_lab.data", description=__doc__)
    parser.add_argument("name", help=f"{', '.join(DATA_SETS)}, an .npz file or a folder of images")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where the official files are")
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="resize a folder's images to this"
    )
    parser.add_argument("--download", action="store_true", help="download the official files if they are missing")
    arguments = parser.parse_args()
    start = perf_counter()
    try:
        with download_bar() as progress:
            size = tuple(arguments.size) if arguments.size else None
            data = load(arguments.name, arguments.root, download=arguments.download, progress=progress, size=size)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"flatmin: {error}")
    except KeyboardInterrupt:
        sys.exit("flatmin: stopped; what was downloaded is kept, and the next try resumes from it")
    Console(soft_wrap=True, highlight=False).print(describe(data, perf_counter() - start), markup=False)


if __name__ == "__main__":
    main()
