"""The command `flatmin`.

app.py                the commands and their help
commands/             a file for each command
options.py            options that commands share, and how an error is told
training_options.py   the options of a training run
request.py            what the user asks for, turned into a recipe, a seed, data and a folder
model_source.py       which model is evaluated, on which data
torchrun.py           `flatmin train` as one of several ranks
display.py            what the terminal shows
signals.py            Ctrl-C and SIGTERM
"""
