"""How runs are executed: in this process, in a pool of processes, or on a Ray cluster.

runner.py         recipe + seed → one result file: train, evaluate, store
replicas.py       many training runs in one process, in turns, on one GPU
process_pool.py   many training runs in parallel, each in a process of its own, on the CPU
cluster/          many training runs on the nodes of a Ray cluster
"""
