"""The command as a test calls it, and what it says in one line."""

from typing import Any

from typer.testing import CliRunner

from flatmin_lab.cli.app import app


def flatmin(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def words(text: str) -> str:
    return " ".join(text.split())
