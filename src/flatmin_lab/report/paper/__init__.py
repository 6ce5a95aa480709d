"""Our results beside the paper's.

tables.py       the paper's tables and figures, filled with our results
claims.py       the paper's claims, tested on our results
families.py     which comparisons are tested together, fixed before the runs
recovered_curves.py    figures 8 and 11 of the paper beside ours
deviations.py   where our runs differ from the paper's
key_results.py  the five sentences at the top of the report
evidence.py     the section of the report that shows all this
"""
