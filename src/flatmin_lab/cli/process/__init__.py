"""The command as a process among others.

signals.py    stop at a signal after the current step, with the exit code that shells expect
torchrun.py   started by torchrun, as one of several ranks
"""
