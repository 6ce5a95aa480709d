"""Tuning a method's hyper-parameters on the validation split.

search_space.py     which hyper-parameters a method has, and in which ranges they are searched
study.py            the tuning as an Optuna study on disk: draws trials, decides which are pruned
trial.py            one trial: a training run in a folder of its own
tuner.py            draws trials, has them trained, keeps the result up to date
trial_queue.py      trials as tasks, each drawn when a worker is free
erm_comparison.py   whether the chosen trial is better than ERM, by each image of the validation split
result.py           what a tuning found, and which trial is chosen
result_file.py      tuning.json, written after every trial and checked when read
summary.py          the result in sentences, for the terminal and the report
"""
