"""How runs are executed: in this process, in a pool of processes, or on a Ray cluster.

task_queue.py     tasks, and the bookkeeping of runs and trials: each ends exactly once
executor.py       the interface of what executes tasks
runner.py         recipe + seed → one result file: train, evaluate, store
beginnings.py     which runs begin the same way, and where one can branch off another
pace.py           what training takes, and when runs that take turns will have ended
deadline.py       which runs are started, and which given up, so that all end in time
run_queue.py      many runs as tasks
local.py          the executor in this process
process_pool.py   the executor with several single-threaded processes
close_up_task.py  the runs of the demo, two of them with a close-up of their network
replicas.py       many training runs in one process, taking turns, on one GPU
cluster/          the executor on the nodes of a Ray cluster
"""
