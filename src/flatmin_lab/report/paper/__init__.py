"""Our results beside the paper's.

tables.py       the paper's tables and figures, filled with our results
claims.py       the paper's claims, tested on our results
deviations.py   where our runs differ from the paper's
evidence.py     the section of the report that shows all this
"""
