"""Training a model: the loop, what it changes, and how several processes share it.

loop.py               epochs of steps, an evaluation after each, checkpoints in between
learner.py            model, optimizer, EMA and random numbers, and a step of them
build.py              data, method, model and its initial weights, as the recipe says
optimizer.py          the base optimizer, torch's or the user's own
model_check.py        does a model take these inputs, return logits, and fit into a checkpoint?
train_state.py        how far a run is between two steps: what a checkpoint holds
epoch_metrics.py      the means of an epoch, kept on the device
ema.py                the exponential moving average of the weights
evaluation.py         logits of a split, and error, NLL and ECE of them
captured_forward.py   the forward pass in eval mode as a CUDA graph
ranks.py              the processes that train one model, and what they must agree on
data_parallel.py      what each rank computes of a step
"""

from flatmin_lab.training.loop import train

__all__ = ["train"]
