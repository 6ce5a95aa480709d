"""Does AMP help me? The user's own training: plain, plain for as long as AMP takes, and with AMP at a few radii.

contenders.py        what is compared
outcome.py           the result of one run, and its file
folder_lock.py       one comparison at a time in a folder
held_out.py          error, NLL and ECE on held-out data, example by example
train_contender.py   one run: a contender and a seed, with the same initial weights and batches as the others
intervals.py         how certain a difference is, over seeds and over held-out examples
verdict.py           the answer in one sentence, and the table
run_comparison.py    `flatmin.compare`: runs what is missing, and decides
"""

from flatmin.comparison.contenders import AUTO, LONGER, PLAIN, RADII, Contender, contenders_for
from flatmin.comparison.intervals import Difference, paired_difference
from flatmin.comparison.outcome import Outcome, read_outcome
from flatmin.comparison.run_comparison import Comparison, Progress, compare
from flatmin.comparison.verdict import Answer, Row, Verdict, judge, show, show_gap, show_interval

__all__ = [
    "AUTO",
    "LONGER",
    "PLAIN",
    "RADII",
    "Answer",
    "Comparison",
    "Contender",
    "Difference",
    "Outcome",
    "Progress",
    "Row",
    "Verdict",
    "compare",
    "contenders_for",
    "judge",
    "paired_difference",
    "read_outcome",
    "show",
    "show_gap",
    "show_interval",
]
