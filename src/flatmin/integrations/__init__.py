"""flatmin in other trainers: Lightning, Accelerate and Hugging Face Transformers.

lightning.py, accelerate.py and transformers.py each import their own framework; importing flatmin imports none of them.
They share replay.py, scheduled_radius.py and automatic_radius.py.
"""
