"""A file for each command: flags in, output in the terminal. Nothing is computed here.

`evaluate.py` has evaluate, landscape, report and theory, `use_model.py` predict and export. What `reproduce` selects
and shows is in `reproduce_select.py` and `reproduce_view.py`; what `bench` shows is in `bench_view.py`; `train --seeds`
is in `train_seeds.py`.
"""
