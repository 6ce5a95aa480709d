"""Our results beside the paper's.

tables.py       the paper's tables and figures, filled with our results
claims.py       the paper's claims, tested on our results
families.py     which comparisons are tested together, fixed before the runs
recovered_curves.py    figures 8 and 11 of the paper beside ours
frontier.py     what cheaper training modes keep of AMP's gain
regret.py       what a radius that adjusts itself loses of it
step_costs.py   what a step of ERM and of AMP takes, with its setting
deviations.py   where our runs differ from the paper's
key_results.py  the sentences at the top of the report
evidence.py     the section of the report that shows all this
"""
