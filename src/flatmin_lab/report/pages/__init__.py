"""One file for each page or section: numbers in, HTML out.

report.py         `flatmin report`
demo.py           `flatmin demo`
demo_networks.py  its closer look at two networks
compare.py        `flatmin compare`
theory.py         `flatmin theory`
landscape.py      `flatmin landscape`, and the report's landscape section
between.py        `flatmin landscape --between`
spectrum.py       the report's section about the spectrum of the Hessian
tuning.py         the report's section about a tuning
confidence.py     the report's section about confidence: error over coverage, outside data
summary_text.py   the sentences that the numbers support
"""
