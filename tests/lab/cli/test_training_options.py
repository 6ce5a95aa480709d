"""A field of the recipe is declared once: its option, its check and its row in the docs follow from the declaration."""

import re
from dataclasses import dataclass, fields
from runpy import run_path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from flatmin_lab import methods
from flatmin_lab.cli.app import app
from flatmin_lab.cli.options import parse_settings
from flatmin_lab.cli.overview import COMMANDS
from flatmin_lab.cli.training_options import method_settings, recipe_changes, recipe_options
from flatmin_lab.recipes.fields import POSITIVE_INT, RISING, TRAINING, descriptions, flag, flags
from flatmin_lab.recipes.recipe import Recipe
from tests import ROOT
from tests.support.processes import words

TEXT = "Epochs without progress after which the run ends."
OF_TUNE = {"ema", "validation"}  # an EMA changes no other number, and a tuning is always on the validation split


@dataclass(frozen=True, kw_only=True)
class PatientRecipe(Recipe):
    patience: int = flag(3, TEXT, POSITIVE_INT, after="warmup")
    restarts: tuple[float, ...] = flag((), "Fractions of the run at which the rate is the highest again.", RISING)


def command_line() -> tuple[typer.Typer, dict[str, Any]]:
    """A command `run` with the options of that recipe, and what it was given at last."""
    made = typer.Typer()
    given: dict[str, Any] = {}

    @made.command()
    @recipe_options(after={"seed": "lr"}, without=("ema",), recipe=PatientRecipe)
    def run(
        seed: Annotated[int, typer.Option(help="Seed.", rich_help_panel=TRAINING)] = 0,
        device: str = "cpu",
        epochs: Annotated[int, typer.Option(help="As many as you like.")] = 7,
        **flags: Any,
    ) -> None:
        """Run."""
        given.update(flags, seed=seed, device=device, epochs=epochs)

    made.callback()(lambda: None)
    return made, given


def test_a_declared_field_has_an_option() -> None:
    made, given = command_line()
    done = CliRunner().invoke(made, ["run", "--patience", "5", "--restarts", "0.2,0.5", "--seed", "1"])
    assert done.exit_code == 0, done.output
    assert recipe_changes(given, PatientRecipe) == {"epochs": 7, "patience": 5, "restarts": (0.2, 0.5)}
    assert given["seed"] == 1
    assert TEXT in words(CliRunner().invoke(made, ["run", "--help"], env={"COLUMNS": "200"}).stdout)


def test_a_declared_field_is_checked() -> None:
    assert PatientRecipe(data="digits", model="mlp").patience == 3
    for patience in (0, 2.5, None):
        with pytest.raises(ValueError, match=f"patience must be a whole number of at least 1, got {patience}"):
            PatientRecipe(data="digits", model="mlp", patience=patience)  # type: ignore[arg-type]


def test_a_declared_field_has_a_row_in_the_docs() -> None:
    assert descriptions(PatientRecipe)["patience"] == f"{TEXT} Must be a whole number of at least 1."
    pytest.importorskip("mkdocs", reason="installed with flatmin[docs]")
    page = list(run_path(str(ROOT / "docs" / "site_hooks" / "pages.py"))["commands"](command_line()[0]))
    assert f'| <code class="flag">--patience</code> INT | {TEXT} |' in page


def test_options_are_listed_after_the_field_that_they_name() -> None:
    listed = [param.name for param in typer.main.get_command(command_line()[0]).commands["run"].params]  # type: ignore[attr-defined]
    assert listed[listed.index("warmup") + 1] == "augment"
    assert listed[listed.index("augment") + 1] == "patience"
    place = listed.index("lr")
    assert listed[place : place + 4] == ["lr", "seed", "device", "momentum"]
    assert "ema" not in listed
    assert listed.count("epochs") == 1


def test_train_and_tune_have_the_options_of_the_recipe_with_their_texts() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    train, tune = ({param.name: param.help for param in known[name].params} for name in ("train", "tune"))
    declared = {name: one.text for name, one in flags(Recipe).items()}
    assert len(declared) > 20
    assert (declared | methods.FLAGS).items() <= train.items()
    assert declared.keys() - OF_TUNE <= tune.keys()
    assert not (OF_TUNE | methods.FLAGS.keys()) & tune.keys()


def test_every_field_with_a_text_is_listed_and_the_others_are_not() -> None:
    """One that is to be listed after a field that has no option would be lost."""
    assert flags(Recipe).keys() == {f.name for f in fields(Recipe)} - {"gamma", "name", "files"}


def test_settings_of_the_method_are_those_given_and_those_of_set() -> None:
    given = dict.fromkeys(methods.FLAGS) | {"epsilon": 0.5, "settings": ["inner_lr=2", "ball=tensor"]}
    assert method_settings(given) == {"epsilon": 0.5, "inner_lr": 2, "ball": "tensor"}


def test_without_momentum_there_is_no_nesterov() -> None:
    assert recipe_changes({"momentum": 0.0}) == {"momentum": 0.0, "nesterov": False}
    assert recipe_changes({"momentum": 0.5, "data": "digits", "lr": None}) == {"momentum": 0.5}  # as it was


def test_a_setting_is_a_number_a_list_of_them_or_a_word() -> None:
    pairs = ["a=1", "b=0.9,0.95", "c=word", "d=", "e=x,y", "f=[1]", "g=.5", "h=-.5,.25", "i=a.5", "j=dir/.5"]
    expected = {"a": 1, "b": [0.9, 0.95], "c": "word", "d": "", "e": "x,y", "f": [1]}
    expected |= {"g": 0.5, "h": [-0.5, 0.25], "i": "a.5", "j": "dir/.5"}
    assert parse_settings(pairs) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_a_narrow_terminal_cuts_no_option_and_no_word_of_the_help(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "--help" in shown
    assert not re.findall(r"\S+[^\s,]…", shown)
