"""Evaluation of a trained classifier (error, calibration, robustness, flatness), and its use.

subject.py         what is evaluated: a model, how images become its inputs, and the data
load_run.py        the subject of a run folder, or of one of its checkpoints
trained_model.py   a run's model to use, without its data
prediction.py      classes of image files
export.py          a trained model in files that need no flatmin
measurements.py    every measurement, as plain numbers
confidence.py      what confidence is worth: risk over coverage, detection of outside data
resampling.py      their intervals, from counted resamples
landscapes.py      the loss over a plane through the weights, and on the line between two models
close_up.py        two networks of the demo: predictions for wrong labels, the loss around them, temperature scaling
post_training.py   the measurements after a training run that go into its result file
"""
