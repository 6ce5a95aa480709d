"""What a training step costs: time, memory, and how far both are from the least that they could be.

benchmark.py       `flatmin bench`: tables over models and batch sizes
contenders.py      the steps that are compared: a method in a form (eager, captured, …)
workload.py        the model and batches that they step on
table.py, rows.py  one table: contenders built, timed in turns, and their ratios
timing.py          blocks of steps by turns, and memory
roofline.py        the least time that arithmetic and bytes allow
amp_cost.py        AMP against ERM, as the paper's table of costs
time_estimate.py   how long a run will take, from a few steps
"""
