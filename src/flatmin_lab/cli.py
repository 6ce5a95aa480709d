"""The command `flatmin`: what is asked for, turned into calls. Nothing is computed here.

Exit codes: 0, 1 for a run that failed, 2 for a request that makes no sense; after Ctrl-C, SIGTERM and a closed terminal
130, 143 and 129.
"""

import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import flatmin
from flatmin_lab import cli_bench, cli_judge, cli_reproduce, cli_tune, methods, models, show
from flatmin_lab import doctor as examination
from flatmin_lab.cli_parts import DATA, DataDir, Debug, Device, Download, option, reported, settings_given
from flatmin_lab.cli_ranks import among_ranks, check_one_model, command_of, device_of, in_words, plan_of
from flatmin_lab.cli_seeds import train_seeds
from flatmin_lab.cli_tuned import Chosen
from flatmin_lab.data import DATA_SETS
from flatmin_lab.data.augment import KINDS
from flatmin_lab.extras import need
from flatmin_lab.machine import device_named, hardware
from flatmin_lab.recipe import PRECISIONS
from flatmin_lab.records import Finished
from flatmin_lab.request import Request
from flatmin_lab.schedules import SCHEDULES
from flatmin_lab.signals import CODES, asked_to_stop, ended_by_signals
from flatmin_lab.train import train as training

app = typer.Typer(
    name="flatmin",
    help="Train neural networks into flat minima: Adversarial Model Perturbation, and what the paper compares it with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


TRAINING, METHOD, SPEED, SAVING = "The training", "The method", "Device and speed", "Checkpoints"


def version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatmin {flatmin.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[bool, option("Print the version.", "--version", callback=version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder for demo.html and demo.json.")] = Path("out/demo"),
    seeds: Annotated[int, typer.Option(help="Trainings of each method, with seeds 0, 1, 2, …")] = 5,
    noise: Annotated[float, typer.Option(help="Share of the training labels replaced by a wrong one.")] = 0.2,
    epochs: Annotated[int, typer.Option(help="Epochs of each training.")] = 24,
    workers: Annotated[int | None, option("Trainings side by side; else one a core.")] = None,
    debug: Debug = False,
) -> None:
    """Train the paper's eight methods on handwritten digits with wrong labels, and write a page about it."""
    with reported(debug), ended_by_signals():
        for package in ("matplotlib", "jinja2", "sklearn"):
            need(package, "flatmin demo")
        run = need("flatmin_lab.demo", "flatmin demo").run  # here, so that other commands need not wait for matplotlib
        page = run(out, seeds=seeds, noise=noise, epochs=epochs, workers=workers, console=show.terminal())
        typer.echo(f"the page: {page}")


@app.command()
def train(
    data: Annotated[str | None, option(f"{', '.join(DATA_SETS)}, an .npz file or a folder of pictures.")] = None,
    method: Annotated[str | None, option(f"{', '.join(methods.METHODS)}; else amp.")] = None,
    model: Annotated[str | None, option(f"{', '.join(models.MODELS)}; else what suits the data set.")] = None,
    data_dir: DataDir = DATA,
    download: Download = False,
    size: Annotated[tuple[int, int] | None, option("Height and width to bring a folder's pictures to.")] = None,
    out: Annotated[Path | None, option("The run's folder; else runs/DATA-MODEL-METHOD-SEED.")] = None,
    resume: Annotated[
        bool,
        option("Go on with the run in --out, with its own settings; begin it (--data) if there is none.", "--resume"),
    ] = False,
    epochs: Annotated[
        int | None, option("How often the training set is seen (the paper: 200).", panel=TRAINING)
    ] = None,
    batch_size: Annotated[int | None, option("Pictures a step (the paper: 50).", panel=TRAINING)] = None,
    lr: Annotated[float | None, option("The top learning rate (the paper: 0.1).", panel=TRAINING)] = None,
    momentum: Annotated[
        float | None, option("SGD's momentum, Nesterov's (the paper's code: 0.9).", panel=TRAINING)
    ] = None,
    weight_decay: Annotated[float | None, option("The paper: 1e-4.", panel=TRAINING)] = None,
    schedule: Annotated[str | None, option(f"{', '.join(SCHEDULES)} (the paper: multi_step).", panel=TRAINING)] = None,
    milestones: Annotated[
        str | None,
        option(
            "For multi_step: the shares of the training after which the rate is divided by ten, as in 0.5,0.75.",
            panel=TRAINING,
        ),
    ] = None,
    warmup: Annotated[float | None, option("Epochs of a linear warm-up.", panel=TRAINING)] = None,
    augment: Annotated[str | None, option(f"{', '.join(KINDS)} (the paper: vanilla).", panel=TRAINING)] = None,
    epsilon: Annotated[
        float | None,
        option("ε: the radius of AMP (else it follows the length), RMP and adversarial training.", panel=METHOD),
    ] = None,
    inner_lr: Annotated[float | None, option("ζ: AMP's rate of ascent.", panel=METHOD)] = None,
    inner_iter: Annotated[int | None, option("N: AMP's steps of ascent.", panel=METHOD)] = None,
    ball: Annotated[str | None, option("What ε bounds: global, group or tensor.", panel=METHOD)] = None,
    norm: Annotated[str | None, option("l2 or linf.", panel=METHOD)] = None,
    settings: Annotated[
        list[str] | None, option("Another setting of the method: smoothing=0.1.", "--set", panel=METHOD)
    ] = None,
    tuned: Annotated[
        Path | None,
        option(
            "A tuning.json of flatmin tune: its data, method, model, length and chosen values; other flags win.",
            panel=METHOD,
        ),
    ] = None,
    clip_norm: Annotated[
        float | None, option("Clip the norm of the gradient that the step takes.", panel=TRAINING)
    ] = None,
    ema: Annotated[
        float | None, option("Decay of a running average of the weights, measured beside them.", panel=TRAINING)
    ] = None,
    label_noise: Annotated[
        float | None, option("Share of the training labels replaced by a wrong one.", panel=TRAINING)
    ] = None,
    validation: Annotated[
        bool | None,
        option(
            "For tuning: hold out a tenth, and measure on it instead of the test set.", "--validation", panel=TRAINING
        ),
    ] = None,
    seed: Annotated[int | None, option("First weights, order and noise; else 0.", panel=TRAINING)] = None,
    seeds: Annotated[
        int, option("Train so many seeds, from --seed on, each in a folder of its own.", min=1, panel=TRAINING)
    ] = 1,
    together: Annotated[
        int | None,
        option("With --seeds: so many at once; else, on a GPU, as many as make it faster.", min=1, panel=SPEED),
    ] = None,
    device: Device = None,
    precision: Annotated[str | None, option(f"{', '.join(PRECISIONS)}; else fp32.", panel=SPEED)] = None,
    channels_last: Annotated[bool | None, option("Pictures as NHWC in memory.", "--channels-last", panel=SPEED)] = None,
    compile_: Annotated[
        bool | None, option("Use torch.compile, on a GPU; the first steps take longer.", "--compile", panel=SPEED)
    ] = None,
    no_capture: Annotated[bool, option("Without CUDA graphs.", "--no-capture", panel=SPEED)] = False,
    deterministic: Annotated[
        bool | None, option("The same bits every time on CUDA too.", "--deterministic", panel=SPEED)
    ] = None,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="A checkpoint every so many epochs …", min=1, rich_help_panel=SAVING)
    ] = 1,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="… and every so many minutes.", min=0, rich_help_panel=SAVING)
    ] = 10.0,
    debug: Debug = False,
) -> None:
    """Train a model after the paper's protocol; kill it when you like, and go on with --resume.

    Under torchrun (torchrun --nproc-per-node 2 -m flatmin_lab train …) several processes train one model.
    """
    fields = {
        "size": size,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "nesterov": None if momentum is None else momentum > 0,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "warmup": warmup,
        "augment": augment,
        "model": model,
        "clip_norm": clip_norm,
        "ema": ema,
        "label_noise": label_noise,
        "validation": validation,
        "precision": precision,
        "channels_last": channels_last,
        "compile": compile_,
        "deterministic": deterministic,
    }
    knobs = {"epsilon": epsilon, "inner_lr": inner_lr, "inner_iter": inner_iter, "ball": ball, "norm": norm}
    with reported(debug):
        with among_ranks() as team:
            with team.together():
                changes: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
                if milestones is not None:
                    changes["milestones"] = _numbers(milestones)
                given = {key: value for key, value in knobs.items() if value is not None} | settings_given(settings)
                where = device_of(device, team)
                chosen = None if tuned is None else Chosen.of(tuned, data=data, method=method)
                if chosen is not None:
                    data, method = data or chosen.tuning.data, chosen.tuning.method
                    changes, given = chosen.changes(changes), chosen.settings(given)
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
                    raise ValueError("--together needs --seeds of 2 or more; add them, or leave it out")
                check_one_model(team, seeds=seeds)
            plans = request.plans(seeds) if team.size == 1 else [plan_of(request, team)]
            plan = plans[0]
            console = show.terminal() if team.leads else show.nowhere()
            with team.together():
                if milestones is not None and plan.recipe.schedule != "multi_step":
                    raise ValueError(f"--milestones belong to the schedule multi_step, got {plan.recipe.schedule}")
                if chosen is not None:
                    chosen.check(plan.data)
                    for note in chosen.notes(plan):
                        show.say(console, f"note: {note}", style="yellow")
            how: dict[str, Any] = {
                "device": where,
                "resume": resume,
                "capture": not no_capture,
                "checkpoint_epochs": checkpoint_epochs,
                "checkpoint_minutes": checkpoint_minutes,
            }
            if seeds > 1:
                train_seeds(plans, console, count=together, **how)
                return
            headline = show.headline(plan.recipe, plan.seed, f"{in_words(team)}{hardware(where)}")
            with asked_to_stop() as stop:
                records = training(
                    plan.recipe, plan.data, seed=plan.seed, folder=plan.folder, stop=stop, team=team, **how
                )
                ended = show.follow(records, console, headline)
        if isinstance(ended, Finished):
            if team.leads:
                show.outcome(ended.result, plan.folder)
            return
        again = ["--out", str(plan.folder), "--resume", *([] if data_dir == DATA else ["--data-dir", str(data_dir)])]
        saved = (
            f"saved after step {ended.step}; go on with: {command_of(team)} train {shlex.join(again)}"
            if ended.step
            else "before its first step"
        )
        show.say(console, f"stopped by {ended.reason}, {saved}")
        raise typer.Exit(CODES[ended.reason])


@app.command()
def doctor(
    training: Annotated[
        str | None, typer.Argument(help="A training of your own: mymodule:make_training, or file.py:make_training.")
    ] = None,
    model: Annotated[
        str | None, option("A built-in model, or one of your own: file.py:make_model. Else convnet.")
    ] = None,
    shape: Annotated[str | None, option("Of one input of that model. Else 3,32,32.")] = None,
    data_dir: DataDir = DATA,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """What is here: versions, devices, data sets, how AMP does on a model; or what to change in a training of yours."""
    with reported(debug):
        if training is not None:
            if (model, shape, device) != (None, None, None):
                raise ValueError(
                    "a training brings its own model, inputs and device: leave out the flags, or the training"
                )
            sound = examination.told(training, examination.own_training(training))
        else:
            given = _numbers("3,32,32" if shape is None else shape)
            sizes = [int(side) for side in given]
            if min(sizes) < 1 or sizes != [*given]:
                raise ValueError(f"--shape takes whole numbers above 0, as in 3,32,32, got {shape}")
            sound = examination.run(model or "convnet", sizes, data_dir, device_named(device))
        if not sound:
            raise typer.Exit(1)


for command in (
    cli_judge.evaluate,
    cli_judge.landscape,
    cli_reproduce.reproduce,
    cli_tune.tune,
    cli_judge.report,
    cli_judge.theory,
    cli_bench.bench,
):
    app.command()(command)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace("x", ",").split(","))
    except ValueError as error:
        raise ValueError(
            f"numbers must be given with commas between, as in 0.5,0.75 or 3,32,32, got {text!r}"
        ) from error
