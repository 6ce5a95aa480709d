"""`flatmin train`: flags turned into a plan, and what is shown at the end."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flatmin_lab.cli import display
from flatmin_lab.cli.commands.train_seeds import train_seeds
from flatmin_lab.cli.config_file import ConfigValues
from flatmin_lab.cli.options import (
    DEFAULT_DATA_DIR,
    ConfigFile,
    DataDir,
    Debug,
    Device,
    Download,
    option,
    report_errors,
)
from flatmin_lab.cli.process.signals import exit_code, stop_on_signals
from flatmin_lab.cli.process.torchrun import among_ranks, check_one_model, command_of, device_of, in_words, plan_of
from flatmin_lab.cli.progress_columns import first_steps_text
from flatmin_lab.cli.request import Plan, Request, TunedValues
from flatmin_lab.cli.training_options import check_used, method_settings, recipe_changes, recipe_options
from flatmin_lab.recipes.fields import DEVICE, METHOD, TRAINING
from flatmin_lab.runs.events import Finished, Stopped
from flatmin_lab.system.machine import hardware
from flatmin_lab.training.loop import train as training
from flatmin_lab.training.ranks import RankGroup

SAVING = "Checkpoints"


@recipe_options(
    after={"config": "init_except", "seed": "validation", "out": "size", "tuned": "settings", "no_capture": "compile"}
)
def train(
    config: ConfigFile = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    seed: Annotated[
        int | None, option("Seed for the initial weights, the data order and the noise; default: 0.", panel=TRAINING)
    ] = None,
    seeds: Annotated[
        int,
        option(
            "Train this many seeds, starting at --seed, each in its own folder.", min=1, panel=TRAINING, metavar="N"
        ),
    ] = 1,
    out: Annotated[Path | None, option("Run folder; default: runs/DATA-MODEL-METHOD-SEED.")] = None,
    resume: Annotated[
        bool,
        option(
            "Resume the run in --out, with the settings it started with; if there is none, start one (needs --data).",
            "--resume",
        ),
    ] = False,
    tuned: Annotated[
        Path | None,
        option(
            "tuning.json from flatmin tune: use its data, method, model, epochs and values; flags override them.",
            panel=METHOD,
        ),
    ] = None,
    together: Annotated[
        int | None,
        option(
            "With --seeds: how many to train at once; default on a GPU: as many as increase the throughput.",
            min=1,
            panel=DEVICE,
        ),
    ] = None,
    device: Device = None,
    no_capture: Annotated[bool, option("Do not use CUDA graphs.", "--no-capture", panel=DEVICE)] = False,
    threads: Annotated[
        int | None,
        option("CPU threads; default: one for a small network, otherwise torch's default.", min=1, panel=DEVICE),
    ] = None,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="Epochs between checkpoints.", min=1, rich_help_panel=SAVING)
    ] = 1,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes between checkpoints.", min=0, rich_help_panel=SAVING)
    ] = 10.0,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Train a model with the paper's protocol. A killed run can be resumed with --resume.

    Under torchrun (torchrun --nproc-per-node 2 -m flatmin_lab train …) several processes train one model together.
    """
    how: dict[str, Any] = {
        "resume": resume,
        "capture": not no_capture,
        "checkpoint_epochs": checkpoint_epochs,
        "checkpoint_minutes": checkpoint_minutes,
        "threads": threads,
    }
    data, method = flags["data"], flags["method"]
    with report_errors(debug):
        with among_ranks() as ranks:
            with ranks.raise_together():
                changes, given = recipe_changes(flags), method_settings(flags)
                how["device"] = device_of(device, ranks)
                if config is not None and tuned is not None:
                    raise ValueError("--config and --tuned both say what to start from; leave one of them out")
                if config is not None:
                    start = ConfigValues.of(config)
                    changes, given = start.changes(changes, data=data), start.settings(given, method)
                    data, method = data or start.data, start.method(method)
                tuned_values = None if tuned is None else TunedValues.of(tuned, data=data, method=method)
                if tuned_values is not None:
                    data, method = data or tuned_values.tuning.data, tuned_values.tuning.method
                    changes, given = tuned_values.changes(changes), tuned_values.settings(given)
                request = Request(
                    data=data,
                    method=method,
                    seed=seed,
                    out=out,
                    resume=resume,
                    data_dir=data_dir,
                    download=download,
                    changes=changes,
                    settings=given,
                )
                if together is not None and seeds == 1:
                    raise ValueError("--together needs --seeds 2 or more; add it, or leave out --together")
                check_one_model(ranks, seeds=seeds)
            plans = request.plans(seeds) if ranks.size == 1 else [plan_of(request, ranks)]
            plan = plans[0]
            console = display.terminal() if ranks.is_main else display.silent()
            with ranks.raise_together():
                check_used(flags, plan.recipe)
                if tuned_values is not None:
                    tuned_values.check(plan.data)
                    for note in tuned_values.notes(plan):
                        display.say(console, f"note: {note}", style="yellow")
            if seeds > 1:
                train_seeds(plans, console, count=together, **how)
                return
            ended = _train(plan, ranks, console, **how)
        if isinstance(ended, Stopped):
            display.say(console, f"stopped by {ended.reason}, {_saved_text(ended, plan, ranks, data_dir)}")
            raise typer.Exit(exit_code(ended.reason))
        if ranks.is_main:
            display.outcome(ended.result, plan.folder)


def _train(plan: Plan, ranks: RankGroup, console: Console, **how: Any) -> Finished | Stopped:
    headline = display.headline(plan.recipe, plan.seed, f"{in_words(ranks)}{hardware(how['device'])}")
    captured = how["capture"] and ranks.size == 1
    first_steps = first_steps_text(plan.recipe, on_gpu=how["device"].type == "cuda", captured=captured)
    with stop_on_signals() as stop:
        events = training(plan.recipe, plan.data, seed=plan.seed, folder=plan.folder, stop=stop, ranks=ranks, **how)
        return display.follow(events, console, headline, first_steps=first_steps)


def _saved_text(ended: Stopped, plan: Plan, ranks: RankGroup, data_dir: Path) -> str:
    """How far the run got, and the command that resumes it."""
    if not ended.step:
        return "before its first step"
    again = [
        "--out",
        str(plan.folder),
        "--resume",
        *([] if data_dir == DEFAULT_DATA_DIR else ["--data-dir", str(data_dir)]),
    ]
    return f"saved after step {ended.step}; resume with: {command_of(ranks)} train {shlex.join(again)}"
