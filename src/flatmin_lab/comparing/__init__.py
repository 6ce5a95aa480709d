"""Does AMP help here? Plain training, plain with as much time, and AMP at a few radii, on the laboratory's data.

contender_recipes.py   what is compared, as recipes
training_task.py       contenders of one seed: trained, measured on held-out data, their outcomes written
time_budget.py         how long a training takes, and whether another one ends in time
training_queue.py      trainings as tasks, seed by seed, in the time there is
comparer.py            has them trained, and keeps the verdict up to date
comparison_file.py     comparison.json: the verdict, and what it rests on; of a user's own training too
"""
