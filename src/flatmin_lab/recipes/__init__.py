"""Recipes: what a training run computes, and the paper's tables and figures as lists of recipes.

fields.py          how a field of the recipe is declared: its text, its rules, its option
recipe.py          everything that decides what a training run computes, except the seed
defaults.py        the default recipe for a data set
protocols.py       how long runs are, and which settings they use
renamed.py         former names of recipes
optimizers.py      base optimizers by name, or the user's own
muon.py            a base optimizer that torch has for matrices alone
user_files.py      the user's own files that a recipe names, and their checksums
lr_schedules.py    learning rates as functions of the step
common_beginning.py  for how many epochs two recipes are the same training
experiments/       tables and figures, the paper's and others, each a function that lists its recipes
paper_numbers.py   what the paper reports
"""

from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Job, Recipe

__all__ = ["Job", "Recipe", "default_recipe"]
