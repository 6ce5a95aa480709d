"""A run is a folder, and its result one file.

events.py             what a training run yields while it runs, and the errors it ends with
folder.py             the files of a run's folder
open_folder.py        opens a run's folder, new or resumed
config.py             config.json: which run a folder and its checkpoints belong to
checkpoint.py         a safetensors file with a checksum
tensorboard.py        the metrics as TensorBoard curves
result.py             result.json, flat
result_store.py       results/: a file for each finished run, and what is planned
evaluation_files.py   what was measured after a run's training
"""

from flatmin_lab.runs.events import (
    DivergedError,
    Epoch,
    Event,
    Failed,
    Finished,
    Measured,
    Note,
    Progress,
    RunError,
    Saved,
    Started,
    Stopped,
)

__all__ = [
    "DivergedError",
    "Epoch",
    "Event",
    "Failed",
    "Finished",
    "Measured",
    "Note",
    "Progress",
    "RunError",
    "Saved",
    "Started",
    "Stopped",
]
