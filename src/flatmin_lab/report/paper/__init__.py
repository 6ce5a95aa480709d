"""Our results beside the paper's.

tables.py       the paper's tables and figures, filled
claims.py       what the paper says in words, held against our numbers
deviations.py   what we did otherwise
evidence.py     the section of the report that shows them
"""
