"""Runs spread over the machines of a Ray cluster: `flatmin reproduce` and `flatmin tune` with `--executor ray`.

    nodes.py         which nodes there are, how many runs fit on each, and what Ray says of a lost worker
    worker.py        a process on a node, which trains what it is given
    worker_pool.py   workers are started where there is room, checked, and ended
    task_queue.py    tasks that wait, and what is known of one that runs
    scheduler.py     workers are given tasks, listened to, and replaced when they die
    file_sync.py     folders on their way to another machine and back
    run_queue.py     runs (Recipe + seed → one result file) as tasks, retried where a worker was lost

The process that was started by the user reads the data, keeps all folders and writes all results; a node needs neither
the data set nor a shared disk, only Ray and the same flatmin.
"""
