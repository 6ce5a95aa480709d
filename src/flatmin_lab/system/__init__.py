"""What the other packages build on: the machine, its files, its random generators, and packages that may be missing.

cpu_clock.py       the CPU time of a run, whatever else uses the cores
files.py           atomic writes, regular files, and locks
host_rng.py        Python's and numpy's global generators, seeded, saved and restored
json_data.py       numbers that JSON can hold, and JSON files that are objects
json_types.py      values from JSON, checked against a dataclass's annotations
machine.py         hardware, versions and commit: what a number was measured with
optional_deps.py   a missing package is named, with the way to install it
rng.py             generators seeded by their purpose; a run's own random state and determinism switches
threads.py         how many threads of the CPU a run computes with
user_code.py       a user's function or class, found by name, called, and its errors
"""
