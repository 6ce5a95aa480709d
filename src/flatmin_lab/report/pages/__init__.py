"""One file of HTML each: numbers in, a page or a section of one out.

report.py         `flatmin report`
demo.py           `flatmin demo`
theory.py         `flatmin theory`
landscape.py      `flatmin landscape`, and the report's section of landscapes
tuning.py         the report's section of a tuning
summary_text.py   sentences that the numbers allow
"""
