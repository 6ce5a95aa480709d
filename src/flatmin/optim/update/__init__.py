"""The gradient that the base steps with, and whether it steps.

accumulation.py   the mean gradient of micro-batches, each with its own Δ
skip_step.py      a base step that does nothing if a gradient was not finite
grad_scaler.py    fp16: scaled gradients, and the state that a torch.amp.GradScaler keeps about them
"""
