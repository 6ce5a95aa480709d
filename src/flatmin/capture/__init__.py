"""A whole training step as one CUDA graph, made by `flatmin.captured_step`.

captured_step.py     the function that a loop calls: captures at the second call, then replays
step_spec.py         what a step computes: model, loss, optimizer, precision
cuda_graph.py        one captured graph, and the memory that all graphs of a step share
clipped_sgd.py       SGD that clips its gradient inside the graph
functional_step.py   the passes with the weights left in place, which a graph can capture
weight_swap.py       other tensors in place of a model's weights, for one pass
compiler.py          torch.compile for a pass, with weight gradients computed alongside the rest of the backward pass
"""

from flatmin.capture.captured_step import CapturedStep
from flatmin.capture.step_spec import StepSpec, autocast_to, rehearsal

__all__ = ["CapturedStep", "StepSpec", "autocast_to", "rehearsal"]
