"""`flatmin reproduce`.

reproduce.py          its flags
reproduce_select.py   which runs it executes
reproduce_view.py     what it shows
"""
