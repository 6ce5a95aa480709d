"""Reports: result files in, one self-contained HTML file out.

loader.py               finished runs and tunings, read from their folders
schema.py               checks of every file that is read
comparison.py           runs that differ only in method and seed, grouped into tables
columns.py, labels.py   the columns of the tables, and titles of data sets and networks
stats.py                Welch's test, Holm's correction, agreement with the paper
suggested_commands.py   the commands that fill a report's gaps
html.py                 rendering of templates, formatting of numbers
pages/                  one file for each page or section
paper/                  our results beside the paper's
figures/                matplotlib figures, each with its numbers
templates/              HTML, CSS and JavaScript
"""
