"""Trainings spread over the machines of a Ray cluster: `flatmin reproduce` and `flatmin tune` with `--executor ray`.

    parcels.py   folders on their way to another machine and back
    hand.py      what works there: a process on a node, which trains what it is given
    nodes.py     which nodes there are, and how many trainings fit on each
    hiring.py    hands are hired where there is room, greeted, and dismissed
    errands.py   what waits to be done, and what is said of it
    crew.py      hands are given errands, listened to, and missed when they die
    told.py      what Ray says of a dead one, in a few words
    spread.py    runs (Recipe + seed → one result file) as errands, tried again where a hand was lost
    spread_trials.py   the trials of a tuning, likewise

The process that was started by the user reads the data, keeps all folders and writes all results; a node needs neither
the data set nor a shared disk, only Ray and the same flatmin.
"""
