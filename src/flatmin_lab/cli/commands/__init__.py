"""A file for each command: flags in, output in the terminal. Nothing is computed here.

`evaluate.py` has evaluate, landscape, report and theory, `use_model.py` predict and export. What `bench` and `compare`
show is in `bench_view.py` and `compare_view.py`; `train --seeds` is in `train_seeds.py`; `reproduce` has a folder.
"""
