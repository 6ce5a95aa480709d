"""What a training step costs in time and memory, and how far that is from the least possible.

benchmark.py       `flatmin bench`: tables over models and batch sizes
contenders.py      the steps that are compared: a method in a form (eager, CUDA graph, …)
workload.py        the model and batches of these steps
table.py, rows.py  one table: contenders, built and timed in turn, and their ratios
timing.py          seconds and memory of blocks of steps
roofline.py        the least time that arithmetic and memory traffic allow
amp_cost.py        AMP's cost over ERM's, as in the paper
mode_cost.py       what cheaper training modes cost, from the times of their kinds of steps
time_estimate.py   how long runs will take, from a few steps of each kind
"""
