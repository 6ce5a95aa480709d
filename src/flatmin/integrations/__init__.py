"""flatmin in other trainers: Lightning, Accelerate and Hugging Face Transformers.

Each framework is imported by its own files alone; importing flatmin imports none of them.

lightning.py          FlatMinima, a callback
lightning_step.py     its step: all passes of a window of micro-batches, in Lightning's order
lightning_checks.py   what it cannot do with a Trainer, said before the training begins
lightning_package.py  Lightning's names, from whichever of its two packages is installed
transformers.py       AMPTrainer, in place of Trainer
accelerate.py         Window, for loops with an Accelerator
recorded_step.py      one micro-batch of a Hugging Face trainer, recorded at θ
replay.py             a pass that runs at θ, and again at θ + Δ with the same random numbers
bookkeeping.py        what a trainer counts or appends in a pass, undone after a replay
scheduled_radius.py   ε during training: a late start, growth, every k-th step
automatic_radius.py   ε matched with the validation loss that the trainer measures
"""
