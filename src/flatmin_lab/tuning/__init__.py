"""Tuning a method's hyper-parameters on the validation split.

search_space.py   what can be tuned, and in which range
study.py          the Optuna study on the disk
trial.py          one trial: a training run in a folder of its own
tuner.py          draws trials, has them trained, keeps the result up to date
ray_trials.py     trials on a Ray cluster
result.py         what a tuning found, and which trial is chosen
result_file.py    tuning.json, written after every trial and checked when read
summary.py        a tuning in words
"""
