"""A file for each command: flags in, output in the terminal. Nothing is computed here.

train.py, train_seeds.py       train, also with several seeds at once
evaluate.py                    evaluate, landscape, report and theory
use_model.py                   predict and export
compare.py, compare_view.py    compare, and its output
tune.py                        tune
reproduce/                     reproduce: which runs, and what is shown of them
bench.py, bench_view.py        bench, and its tables
demo.py                        demo
doctor.py                      doctor
"""
