"""A whole training step as one CUDA graph: `flatmin.captured_step` makes it.

captured_step.py     the function a loop calls: captures at the second call, then replays
step_spec.py         what a step is asked to do: model, loss, optimizer, precision
graph.py             one recorded graph, and the memory that all graphs of a step share
packed_outputs.py    what a replay leaves, copied out in one piece
functional_step.py   the passes as functions of weights, which a graph can record
weight_swap.py       a model whose weights are, for a while, other tensors
compiler.py          torch.compile around a pass, with weight gradients beside the rest of the backward pass
"""

from flatmin.capture.captured_step import CapturedStep

__all__ = ["CapturedStep"]
