"""Does AMP help here? Plain training, the same with as much time, and AMP at a few radii, on the laboratory's data.

contender_recipes.py   what is compared, as recipes
training_task.py       contenders of one seed: trains them, measures them on held-out data, writes their outcomes
time_budget.py         how long a run takes, and whether another one would end in time
training_queue.py      runs as tasks, seed by seed, within the time limit
comparer.py            has them trained, and keeps the verdict up to date
comparison_file.py     comparison.json: the verdict and what it is based on, also for the user's own training code
"""
