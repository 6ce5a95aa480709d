"""How runs are carried out: in this process, in a pool of processes, or on a Ray cluster.

runner.py         recipe + seed → one result file: trained, evaluated, written down
replicas.py       many training runs in one process, by turns, on one GPU
process_pool.py   many training runs side by side, a process each, on the CPU
cluster/          many machines
"""
