"""What steps measure, and where it goes.

step_info.py    the numbers of the last step, and the loss in what a closure returned
step_log.py     their means over many steps, written to files and trackers
"""
