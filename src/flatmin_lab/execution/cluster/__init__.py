"""Runs on the nodes of a Ray cluster: `flatmin reproduce` and `flatmin tune` with `--executor ray`.

    nodes.py         which nodes there are, how many workers fit on each, and why a worker was lost
    worker.py        a process on a node that runs one task at a time
    worker_pool.py   starts workers where there is room, checks and stops them
    scheduler.py     the executor: assigns tasks to workers, receives their events, notices lost workers
    file_sync.py     copies folders to another machine, and their changes back
    run_queue.py     runs whose folders are locked here while workers train copies of them

The user's process reads the data, keeps all run folders and writes all results; a node needs neither the data set nor a
shared disk, only Ray and the same flatmin.
"""
