"""Evaluation of a trained classifier: error, calibration, robustness, flatness.

subject.py         what is evaluated: a model, how images become its inputs, and the data
load_run.py        the subject of a run folder, or of one of its checkpoints
user_model.py      a user's own model: the function that builds it, and its file of weights
user_code.py       a user's function or class, found by name
measurements.py    every measurement, as plain numbers
landscapes.py      the loss over a plane through the weights
post_training.py   the measurements that follow a training run and go into its result file
"""
