"""What a trained classifier is worth: error, calibration, robustness, flatness.

subject.py         what is evaluated: a model, how images become its inputs, and the data
load_run.py        the subject of a run folder, or of one checkpoint of it
user_model.py      the subject's model where it is the user's own: a function, and a file of weights
user_code.py       a function or class of the user's, by name
measurements.py    everything that is measured, as plain numbers
landscapes.py      the loss over a plane through the weights
post_training.py   what is measured of every run after its training, for its result file
"""
