"""Programs that tests start are no tests, and import what may not be there."""

collect_ignore = ["lightning_ranks.py", "pytorch_lightning_alone.py"]
