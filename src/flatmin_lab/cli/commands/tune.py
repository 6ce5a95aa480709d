"""`flatmin tune`: a method's hyper-parameters, tuned on the validation split. Its flags and output; see tuning/."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatmin_lab import methods as all_methods
from flatmin_lab.cli import display
from flatmin_lab.cli.config_file import ConfigValues
from flatmin_lab.cli.options import (
    DEFAULT_DATA_DIR,
    Address,
    ConfigFile,
    DataDir,
    Debug,
    Download,
    Executor,
    Gpus,
    open_executor,
    option,
    parse_settings,
    report_errors,
)
from flatmin_lab.cli.process.signals import exit_code, stop_on_signals
from flatmin_lab.cli.progress_columns import SECONDS_OF_EPOCHS
from flatmin_lab.cli.request import data_location, read_data
from flatmin_lab.cli.training_options import check_used, recipe_changes, recipe_options
from flatmin_lab.data import DATA_SETS
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.fields import TRAINING
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Started
from flatmin_lab.system.optional_deps import need
from flatmin_lab.tuning import result_file, summary
from flatmin_lab.tuning.result import Tuning
from flatmin_lab.tuning.result_file import FILE
from flatmin_lab.tuning.search_space import (
    Measure,
    SearchSpace,
    describe_settings,
    hyper_parameters_of,
    without_auto,
)
from flatmin_lab.tuning.study import Draw, default_name
from flatmin_lab.tuning.trial import Pruned
from flatmin_lab.tuning.tuner import tune as tuning

HOW = "Execution"
TUNING = Path("tuning")


@recipe_options(
    after={"config": "init_except", "trials": "method", "seed": "deterministic"},
    without=("ema", "validation", *all_methods.FLAGS),
)
def tune(
    config: ConfigFile = None,
    method: Annotated[str | None, option(f"{', '.join(all_methods.METHODS)}; default: amp.")] = None,
    trials: Annotated[
        int,
        typer.Option(help="How many trials in total, including ERM's (the first) and those of earlier calls.", min=1),
    ] = 20,
    measure: Annotated[
        str, typer.Option(help="What to minimise: error or nll on the validation split after the last epoch.")
    ] = "error",
    knobs: Annotated[
        str | None,
        option("What to tune, such as epsilon or lr,weight_decay; default: all hyper-parameters of the method."),
    ] = None,
    out: Annotated[Path | None, option("Folder for the tuning; default: DATA-MODEL-METHOD-LENGTH in tuning.")] = None,
    epochs: Annotated[
        int | None,
        option(
            "As many as you will train for, since the best radius grows with them; default: depends on the data set.",
            panel=TRAINING,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        option(
            "A setting of the method to keep fixed, such as inner_iter=2; repeat for several.", "--set", panel=TRAINING
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed for the sampled values, and for the split and initial weights of all trials.",
            rich_help_panel=HOW,
        ),
    ] = 0,
    no_pruning: Annotated[
        bool, option("Train every trial to the end, even bad ones.", "--no-pruning", panel=HOW)
    ] = False,
    device: Annotated[str | None, option("cpu, cuda:0, or cuda:0,cuda:2; default: all GPUs.", panel=HOW)] = None,
    workers: Annotated[
        int | None,
        option(
            "Trials at once, each in its own process; default: one per GPU, one on a CPU, as many as fit on a cluster.",
            min=1,
            panel=HOW,
        ),
    ] = None,
    storage: Annotated[
        str | None, option("Where Optuna stores the study; default: sqlite:///OUT/study.db.", panel=HOW)
    ] = None,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="Epochs between checkpoints of a trial.", min=1, rich_help_panel=HOW)
    ] = 1,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    executor: Executor = "local",
    address: Address = None,
    gpus: Gpus = None,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Tune AMP's ε and ζ, or another method's settings, without the test set. To resume, repeat the command."""
    with report_errors(debug):
        optuna: Any = need("optuna", "flatmin tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # this command reports instead
        data: str | None = flags["data"]
        asked, fixed = recipe_changes({**flags, "epochs": epochs}), parse_settings(settings)
        start = ConfigValues({}) if config is None else ConfigValues.of(config)
        data, method, asked_method = data or start.data, start.method(method) or "amp", method
        if data is None:
            raise ValueError(f"--data must name a data set ({', '.join(DATA_SETS)}, or a path)")
        names = None if knobs is None else [name.strip().replace("-", "_") for name in knobs.split(",")]
        given = [*fixed, *asked]
        asked = start.changes(asked, data=data)  # a file's values go to the first trial
        asked.pop("validation", None)
        optimizer = {key: asked[key] for key in ("optimizer", "optimizer_settings") if key in asked}
        tuned_for = hyper_parameters_of(method, names, fixed=given, **optimizer)
        fixed, dropped = without_auto(start.settings(fixed, asked_method), tuned_for, given=given)
        dataset = read_data(data, data_dir, download=download, size=asked.get("size"))
        search = SearchSpace(
            recipe=default_recipe(
                data_location(data), dataset, method=method, settings=fixed, validation=True, **cast(Any, asked)
            ),
            hyper_parameters=tuned_for,
            measure=cast(Measure, measure),
            seed=seed,
            pruning=not no_pruning,
            asked=asked,
        )
        check_used(flags, search.recipe)
        folder = out or TUNING / default_name(search.recipe, dataset)
        console = display.terminal()
        where: dict[str, Any] = {"address": address, "gpus": gpus, "device": device, "workers": workers}
        with open_executor(executor, **where, console=console) as there, stop_on_signals() as stop:
            display.say(console, headline(search, trials, there.hardware))
            if dropped:
                display.say(console, f"note: ε is tuned, so {dropped} of {config} is not used", style="yellow")
            events = tuning(
                search,
                dataset,
                folder=folder,
                trials=trials,
                storage=storage,
                executor=there,
                root=data_dir,
                checkpoint_epochs=checkpoint_epochs,
                stop=stop,
            )
            follow(events, console, search, trials)
            reason = stop()
        found = result_file.read(folder / FILE)
        outcome(found, folder, data_dir)
        if reason is not None and found.ended < trials:
            display.say(console, f"stopped by {reason}; the same command resumes")
            raise typer.Exit(exit_code(reason))
        if found.chosen is None:
            raise typer.Exit(1)


# ---- output


def headline(search: SearchSpace, trials: int, hardware: str) -> str:
    recipe = search.recipe
    ranges = (f"{p.symbol} from {p.formatted(p.low)} to {p.formatted(p.high)}" for p in search.hyper_parameters)
    erm = ", the first with ERM" if search.has_erm_trial else ""
    return (
        f"{recipe.method}, {' and '.join(ranges)}: {trials} trials of {display.epochs_text(recipe.epochs)}{erm}, "
        f"{recipe.model} on {recipe.data}, measured on a held-out tenth of the training set, {recipe.precision} on "
        f"{hardware}"
    )


def follow(events: Iterable[tuple[Draw, Event]], console: Console, search: SearchSpace, trials: int) -> None:
    """Show the trials until all have ended, a line for each."""
    epochs, width = search.recipe.epochs, len(str(trials - 1))
    lines: dict[int, Mapping[str, Any]] = {}  # of the last epochs
    done: dict[int, int] = {}
    with display.bars(console, speed_seconds=SECONDS_OF_EPOCHS) as progress:
        task = progress.add_task("tuning", total=None, numbers="preparing the first trial")
        for draw, event in events:
            number = draw.number
            if isinstance(event, Epoch):
                lines[number], done[number] = event.numbers, event.epoch
            elif isinstance(event, Finished | Failed | Pruned):
                done[number] = epochs
            for text, style in event_lines(event, lines.get(number, {}), epochs):
                what = "ERM" if draw.is_erm else describe_settings(search.recipe.method, draw.settings)
                who = f"trial {number:{width}}  {what}"
                display.say(console, f"{who}: {text}", style=style)
            before = (max(done, default=-1) + 1 - len(done)) * epochs  # of trials of an earlier call
            where = f"trial {number}, epoch {min(done.get(number, 0) + 1, epochs)} of {epochs}"
            progress.update(task, completed=before + sum(done.values()), total=trials * epochs, numbers=where)


def event_lines(event: Event, last: Mapping[str, Any], epochs: int) -> Iterator[tuple[str, str]]:
    """The lines to print for an event, and their colours."""
    match event:
        case Started() if event.step:
            yield f"resumed after step {event.step} of {event.steps}", ""
        case Finished():
            yield f"{_measured(event.result)}; {event.result['seconds']:.0f} s", ""
        case Pruned():
            yield f"pruned after epoch {last['epoch']} of {epochs}, {_measured(last)}", ""
        case Failed():
            yield f"failed: {event.what}", "red"
        case Note():
            yield f"note: {event.text}", "yellow"


def _measured(found: Mapping[str, Any]) -> str:
    error, nll = (display.number(name, found[f"validation_{name}"]) for name in ("error", "nll"))
    return f"validation error {error}, NLL {nll}"


def outcome(found: Tuning, folder: Path, data_dir: Path) -> None:
    """The trials, best first; what was chosen, and what it gains over ERM; and the commands that train with it."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(found))
    display.say(console, f"\n{summary.describe_choice(found)}")
    if gain := summary.describe_gain(found):
        display.say(console, gain, style="yellow" if found.is_better_than_erm is False else "")
    if found.chosen is not None:
        place = [] if data_dir == DEFAULT_DATA_DIR else ["--data-dir", str(data_dir)]
        display.say(console, f"To train with it on the whole training set:\n  {shlex.join([*found.command(), *place])}")
        display.say(console, f"or\n  {shlex.join(['flatmin', 'train', '--tuned', str(folder / FILE), *place])}")
    display.say(console, f"everything is in {folder}; flatmin report {shlex.quote(str(folder))} shows it")


def table(found: Tuning) -> Table:
    symbols = (parameter.symbol for parameter in found.hyper_parameters)
    shown = Table("trial", *symbols, "validation error", "NLL", "epochs", "seconds", "", box=None, pad_edge=False)
    for trial in found.ranked():
        drawn = trial.settings  # a trial that was killed while its values were drawn may lack some
        settings = (p.formatted(drawn[p.name]) if p.name in drawn else "" for p in found.hyper_parameters)
        shown.add_row(
            str(trial.number),
            *settings,
            summary.format_measure("error", trial.error),
            summary.format_measure("nll", trial.nll),
            str(trial.epochs),
            "" if trial.seconds is None else f"{trial.seconds:.1f}",
            Text(display.escape_controls(summary.describe_end(trial, found))),
        )
    return shown
