"""The command `flatmin`.

app.py                the commands and their help
overview.py           --help and --version, without waiting for torch
commands/             a file for each command
options.py            options that commands share, and how errors are reported
training_options.py   the options of a training run
config_file.py        `--config`: a recipe from a file, as the start of another run
request.py            the flags of `flatmin train`, turned into a recipe, a seed, data and a folder
model_source.py       which models are evaluated, and on which data
browser.py            --open: opens a page in the default browser
display.py            progress and results in the terminal
progress_columns.py   what a progress bar says: the time left, or what is happening until there is an estimate
process/              Ctrl-C and SIGTERM; several ranks under torchrun
"""
