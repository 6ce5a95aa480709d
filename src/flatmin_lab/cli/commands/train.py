"""`flatmin train`: flags turned into a plan, and what is shown when it has ended."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flatmin_lab import methods
from flatmin_lab.cli import display
from flatmin_lab.cli import training_options as flags
from flatmin_lab.cli.commands.train_seeds import train_seeds
from flatmin_lab.cli.options import (
    DEFAULT_DATA_DIR,
    DataDir,
    Debug,
    Device,
    Download,
    option,
    parse_settings,
    report_errors,
)
from flatmin_lab.cli.request import Plan, Request, TunedValues
from flatmin_lab.cli.signals import exit_code, stop_on_signals
from flatmin_lab.cli.torchrun import among_ranks, check_one_model, command_of, device_of, in_words, plan_of
from flatmin_lab.cli.training_options import SPEED, TRAINING, check_milestones, recipe_changes
from flatmin_lab.runs.events import Finished, Stopped
from flatmin_lab.system.machine import hardware
from flatmin_lab.training.loop import train as training
from flatmin_lab.training.ranks import RankGroup

METHOD, SAVING = "Method", "Checkpoints"


def train(
    data: flags.Data = None,
    method: Annotated[str | None, option(f"{', '.join(methods.METHODS)}; default: amp.")] = None,
    model: flags.Model = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    size: flags.Size = None,
    out: Annotated[Path | None, option("The run folder; default: runs/DATA-MODEL-METHOD-SEED.")] = None,
    resume: Annotated[
        bool,
        option("Resume the run in --out, with its own settings; if there is none, start it (with --data).", "--resume"),
    ] = False,
    epochs: Annotated[int | None, option("Passes over the training set (the paper: 200).", panel=TRAINING)] = None,
    batch_size: flags.BatchSize = None,
    lr: flags.Lr = None,
    momentum: flags.Momentum = None,
    weight_decay: flags.WeightDecay = None,
    schedule: flags.Schedule = None,
    milestones: flags.Milestones = None,
    warmup: flags.Warmup = None,
    augment: flags.Augment = None,
    epsilon: Annotated[
        float | None,
        option("ε: the radius of AMP (default: by the length of the run), RMP and adversarial training.", panel=METHOD),
    ] = None,
    inner_lr: Annotated[float | None, option("ζ: AMP's learning rate of the ascent.", panel=METHOD)] = None,
    inner_iter: Annotated[int | None, option("N: AMP's ascent steps.", panel=METHOD)] = None,
    ball: Annotated[str | None, option("What ε bounds: global, group or tensor.", panel=METHOD)] = None,
    norm: Annotated[str | None, option("l2 or linf.", panel=METHOD)] = None,
    settings: Annotated[
        list[str] | None, option("Any setting of the method, as in smoothing=0.1.", "--set", panel=METHOD)
    ] = None,
    tuned: Annotated[
        Path | None,
        option(
            "A tuning.json of flatmin tune: its data, method, model, length and chosen values; flags override it.",
            panel=METHOD,
        ),
    ] = None,
    clip_norm: flags.ClipNorm = None,
    ema: Annotated[
        float | None, option("Decay of an EMA of the weights, which is evaluated beside them.", panel=TRAINING)
    ] = None,
    label_noise: flags.LabelNoise = None,
    validation: Annotated[
        bool | None,
        option(
            "For tuning: hold out a tenth of the training set, and evaluate on it instead of the test set.",
            "--validation",
            panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[int | None, option("Seed of initial weights, order and noise; default: 0.", panel=TRAINING)] = None,
    seeds: Annotated[
        int, option("Train so many seeds, starting at --seed, each in its own folder.", min=1, panel=TRAINING)
    ] = 1,
    together: Annotated[
        int | None,
        option("With --seeds: runs at once; default, on a GPU: as many as make it faster.", min=1, panel=SPEED),
    ] = None,
    device: Device = None,
    precision: flags.Precision = None,
    channels_last: flags.ChannelsLast = None,
    compile_: flags.Compile = None,
    no_capture: Annotated[bool, option("Do not use CUDA graphs.", "--no-capture", panel=SPEED)] = False,
    deterministic: flags.Deterministic = None,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="Epochs between checkpoints.", min=1, rich_help_panel=SAVING)
    ] = 1,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes between checkpoints.", min=0, rich_help_panel=SAVING)
    ] = 10.0,
    debug: Debug = False,
) -> None:
    """Train a model by the paper's protocol; kill it at any time, and resume it with --resume.

    Under torchrun (torchrun --nproc-per-node 2 -m flatmin_lab train …) several processes train one model.
    """
    method_settings = {"epsilon": epsilon, "inner_lr": inner_lr, "inner_iter": inner_iter, "ball": ball, "norm": norm}
    how: dict[str, Any] = {
        "resume": resume,
        "capture": not no_capture,
        "checkpoint_epochs": checkpoint_epochs,
        "checkpoint_minutes": checkpoint_minutes,
    }
    with report_errors(debug):
        with among_ranks() as ranks:
            with ranks.raise_together():
                changes = recipe_changes(
                    model=model,
                    size=size,
                    epochs=epochs,
                    batch_size=batch_size,
                    lr=lr,
                    momentum=momentum,
                    weight_decay=weight_decay,
                    schedule=schedule,
                    milestones=milestones,
                    warmup=warmup,
                    augment=augment,
                    clip_norm=clip_norm,
                    ema=ema,
                    label_noise=label_noise,
                    validation=validation,
                    precision=precision,
                    channels_last=channels_last,
                    compile=compile_,
                    deterministic=deterministic,
                )
                given = {key: value for key, value in method_settings.items() if value is not None} | parse_settings(
                    settings
                )
                how["device"] = device_of(device, ranks)
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
                check_milestones(milestones, plan.recipe)
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
    with stop_on_signals() as stop:
        events = training(plan.recipe, plan.data, seed=plan.seed, folder=plan.folder, stop=stop, ranks=ranks, **how)
        return display.follow(events, console, headline)


def _saved_text(ended: Stopped, plan: Plan, ranks: RankGroup, data_dir: Path) -> str:
    """How far the run came, and the command that resumes it."""
    if not ended.step:
        return "before its first step"
    again = [
        "--out",
        str(plan.folder),
        "--resume",
        *([] if data_dir == DEFAULT_DATA_DIR else ["--data-dir", str(data_dir)]),
    ]
    return f"saved after step {ended.step}; resume with: {command_of(ranks)} train {shlex.join(again)}"
