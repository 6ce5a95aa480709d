"""`flatmin compare`: does AMP help? On the laboratory's data, or in the user's own code. Flags and output alone.

Runs on the laboratory's data are in comparing/, those of the user's own code in `flatmin.compare`.
"""

import errno
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import flatmin
from flatmin.comparison import RADII
from flatmin.comparison.run_comparison import Progress
from flatmin.doctor.finding import Crash
from flatmin_lab.cli import display
from flatmin_lab.cli.commands import compare_view
from flatmin_lab.cli.config_file import ConfigValues
from flatmin_lab.cli.options import (
    DEFAULT_DATA_DIR,
    ConfigFile,
    DataDir,
    Debug,
    Download,
    open_executor,
    option,
    report_errors,
)
from flatmin_lab.cli.process.signals import exit_code, exit_on_signals, stop_on_signals
from flatmin_lab.cli.request import data_location, read_data
from flatmin_lab.cli.training_options import (
    check_used,
    method_settings,
    parse_numbers,
    recipe_changes,
    recipe_options,
)
from flatmin_lab.comparing import comparison_file
from flatmin_lab.comparing.comparer import Comparison, about_entries
from flatmin_lab.comparing.comparison_file import MAKE_TRAINING, About
from flatmin_lab.comparing.contender_recipes import entries_for
from flatmin_lab.comparing.time_budget import TimeBudget
from flatmin_lab.comparing.training_task import MEASURES
from flatmin_lab.data import DATA_SETS
from flatmin_lab.execution.process_pool import cores
from flatmin_lab.models.user_model import short_name
from flatmin_lab.recipes.fields import METHOD
from flatmin_lab.runs.events import RunError
from flatmin_lab.runs.open_folder import folder_of_runs
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.machine import facts
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.user_code import UserCodeError, is_user_code, load_function, located

HOW = "Execution"
COMPARISONS = Path("comparisons")
PAGE = "comparison.html"
# flags that also apply to the user's own training code
OF_BOTH = ("epochs", "start", "seeds", "minutes", "measure", "radii", "out")


@recipe_options(
    after={"training": "data", "config": "init_except", "device": "deterministic"},
    without=("method", "ema", "validation", "epsilon"),
)
def compare(
    training: Annotated[
        str | None, typer.Argument(help="Your own training code: mymodule:make_training or file.py:make_training.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="How many seeds to train in total, including those of earlier calls.", min=1)
    ] = 3,
    minutes: Annotated[
        float | None, option("Start only what would finish within this many minutes; default: no limit.")
    ] = None,
    radii: Annotated[
        str | None, option("AMP's radii, such as 0.03,0.1,0.3; default: three around a suitable value.")
    ] = None,
    measure: Annotated[
        str | None,
        option("The measure that decides: error, nll, ece, or one of your own; default: error, or your first."),
    ] = None,
    out: Annotated[Path | None, option("Folder for the comparison; default: comparisons/DATA-MODEL-LENGTH.")] = None,
    config: ConfigFile = None,
    settings: Annotated[
        list[str] | None,
        option("Any setting of AMP, such as inner_iter=2; repeat for several.", "--set", panel=METHOD),
    ] = None,
    device: Annotated[str | None, option("cpu, cuda:0, or cuda:0,cuda:2; default: all GPUs.", panel=HOW)] = None,
    workers: Annotated[
        int | None,
        option(
            "On a CPU: how many runs to train at once, each in its own process; default: one per core.",
            min=1,
            panel=HOW,
        ),
    ] = None,
    checkpoint_epochs: Annotated[int, typer.Option(help="Epochs between checkpoints.", min=1, rich_help_panel=HOW)] = 1,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Does AMP help? Train with it, without it, and without it at equal cost; answer yes, no, or cannot tell.

    It trains on a data set (--data, with the flags of train) or runs your own training code.

    To resume, repeat the command.
    """
    with report_errors(debug), _full_disk_explained():
        page: Any = need("flatmin_lab.report.pages.compare", "flatmin compare")
        given = {"seeds": seeds, "minutes": minutes, "radii": radii, "measure": measure, "out": out}
        of_lab = {**flags, "settings": settings, "config": config, "device": device, "workers": workers}
        if minutes is not None and not minutes > 0:
            raise ValueError(f"--minutes must be above 0, got {minutes:g}; leave it out to train all seeds")
        chosen = None if radii is None else parse_numbers(radii)
        console = display.terminal()
        if training is not None:
            _check_own(training, of_lab)
            own = {"epochs": flags["epochs"], "start": flags["start"], **given}
            content, folder = _compare_own(training, own, chosen, _command({"": training, **own}), console)
            reason = None
        else:
            command = _command({**of_lab, **given, "data_dir": None if data_dir == DEFAULT_DATA_DIR else data_dir})
            comparison = _comparison(of_lab, given, chosen, data_dir, download=download)
            comparison.about = replace(comparison.about, command=command)
            comparison.root, comparison.checkpoint_epochs = str(data_dir), checkpoint_epochs
            asked: dict[str, Any] = {"address": None, "gpus": None, "device": device, "workers": workers}
            with (
                open_executor("local", **asked, console=console, default_workers=cores) as there,
                stop_on_signals() as stop,
            ):
                about = replace(comparison.about, facts=there.facts())
                comparison.about = about
                _, at_once = there.capacity(len(comparison.entries))
                display.say(console, compare_view.headline(about, comparison.entries, f"{there.hardware}, {at_once}"))
                events = comparison.run(there, stop=stop)
                compare_view.follow(events, console, comparison, there)
                reason = stop()
            content, folder = comparison.content(), comparison.folder
        try:
            with atomic_write(folder / PAGE) as file:
                file.write(page.compare_page(content).encode())
            display.say(console, f"the page: {folder / PAGE}; everything is in {folder}")
        finally:  # there may be no room for the page, or nobody to read this
            compare_view.show(content)
        if reason is not None:
            display.say(console, f"stopped by {reason}; the same command resumes")
            raise typer.Exit(exit_code(reason))


@contextmanager
def _full_disk_explained() -> Iterator[None]:
    """An error of the disk names neither a file nor a way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunError(
            f"the comparison could not be written ({error.strerror}); make room and repeat the command, which resumes: "
            "finished runs are kept"
        ) from error


def _command(given: Mapping[str, Any]) -> str:
    """The command with these flags; flags without a value were not given."""
    words = ["flatmin", "compare"]
    for name, value in given.items():
        flag = "--set" if name == "settings" else f"--{name.replace('_', '-')}"
        match value:
            case None:
                continue
            case bool():
                words.append(flag if value else f"--no-{flag[2:]}")
            case list():
                words += [word for one in value for word in (flag, str(one))]
            case tuple():
                words += [flag, *map(str, value)]
            case _:
                words += ([flag] if name else []) + [str(value)]
    return shlex.join(words)


# ---- the laboratory's data


def _comparison(
    flags: Mapping[str, Any],
    given: Mapping[str, Any],
    radii: Iterable[float] | None,
    data_dir: Path,
    *,
    download: bool,
) -> Comparison:
    start = ConfigValues({}) if flags["config"] is None else ConfigValues.of(flags["config"])
    changes = start.changes(recipe_changes(flags), data=flags["data"])
    settings = method_settings({**flags, "epsilon": None})
    data = flags["data"] or start.data
    if data is None:
        raise ValueError(
            f"compare needs --data with a data set ({', '.join(DATA_SETS)}, or a path), or your own training code, as "
            "in flatmin compare mymodule:make_training"
        )
    if given["measure"] not in (None, *MEASURES):
        raise ValueError(f"--measure must be one of {', '.join(MEASURES)}, got {given['measure']!r}")
    dataset = read_data(data, data_dir, download=download, size=changes.get("size"))
    changes = {key: value for key, value in changes.items() if key not in ("validation", "ema")}
    entries = entries_for(
        data_location(data), dataset, changes=changes, settings=settings, radii=None if radii is None else list(radii)
    )
    plain = entries[0].recipe
    check_used(flags, plain)
    name = f"{dataset.name}-{short_name(plain.model)}-{plain.epochs}-epochs"
    minutes = given["minutes"]
    return Comparison(
        entries,
        dataset,
        given["out"] or COMPARISONS / name,
        about_entries(entries, dataset, seeds=given["seeds"]),
        budget=TimeBudget(None if minutes is None else 60 * minutes),
        measure=given["measure"],
    )


# ---- the user's own training code


def _check_own(training: str, flags: Mapping[str, Any]) -> None:
    if not is_user_code(training):
        raise ValueError(
            f"compare takes mymodule:make_training or file.py:make_training, got {training!r}; a data set is named "
            "with --data"
        )
    if foreign := [name for name, value in flags.items() if value is not None and name not in OF_BOTH]:
        raise ValueError(
            f"your own training code has its own data, model and optimizer, got --{foreign[0].replace('_', '-')} "
            f"as well as {training}; leave out one of the two"
        )


def _compare_own(
    training: str,
    given: Mapping[str, Any],
    radii: Iterable[float] | None,
    command: str,
    console: Console,
) -> tuple[Mapping[str, Any], Path]:
    make_training = load_function(training, MAKE_TRAINING)
    identity = comparison_file.own_identity(training)
    folder = given["out"] or COMPARISONS / short_name(located(training, MAKE_TRAINING))
    chosen = None if radii is None else tuple(radii)
    watch = compare_view.OwnProgress(console, given["seeds"], len(chosen or RADII))

    def show(event: Progress) -> None:
        comparison_file.begin_own(folder, identity)
        watch.show(event)

    display.say(
        console, f"{training}: {given['seeds']} seed{'s' if given['seeds'] > 1 else ''}; the doctor checks it first"
    )
    with exit_on_signals(), folder_of_runs(folder, "comparison", doing="comparing"):
        comparison_file.check_same_own(folder, identity)
        try:
            found = flatmin.compare(
                make_training,
                epochs=given["epochs"],
                start=given["start"] or 0.0,
                seeds=given["seeds"],
                minutes=given["minutes"],
                radii=chosen,
                measure=given["measure"],
                out=folder,
                progress=show,
            )
        except Crash as crash:
            seen = crash.finding()
            raise UserCodeError(f"{seen.name} raised an error:\n{seen.seen}") from crash.error
        for finding in found.findings:
            display.say(console, f"note: {finding.name}: {finding.seen} → {finding.change}", style="yellow")
        about = About(
            title=training,
            what=f"{training}, with its own optimizer and with AMP around it",
            held_out="what make_training returns as held_out or evaluate",
            wanted=given["seeds"],
            identity=identity,
            command=command,
            facts=facts(found.device or torch.device("cpu")),
        )
        content = comparison_file.content(about, found.contenders, found.outcomes, found.verdict, stopped=found.stopped)
        comparison_file.write(folder, content)
    return content, folder
