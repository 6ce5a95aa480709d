"""Results as pages: result files come in, one HTML file without any other comes out.

loader.py               finished runs, read from their folders
schema.py               what is needed of a file, checked
comparison.py           runs that differ in method and seed alone, in one table
columns.py, labels.py   what tables show, and what things are called
stats.py                Welch's test, Holm's rule, agreement with the paper
suggested_commands.py   the commands that fill what a report lacks
html.py                 templates, and how numbers are printed
pages/                  the pages
paper/                  our results beside the paper's
figures/                figures, each with its numbers
templates/              HTML, CSS and JavaScript
"""
