"""flatmin in other trainers: Lightning, Accelerate and Hugging Face Transformers.

Each file imports its own framework; importing flatmin imports none of them. They share replay.py,
scheduled_radius.py and automatic_radius.py.
"""
