"""What every part of the library stands on: tensors, lists of tensors, the state of a model, several ranks.

tensors.py          arithmetic on lists of tensors that never asks the host; `Copies` that are put back
multi_tensor.py     many tensors in one launch, through triton_kernels.py where Triton is there
model_state.py      buffers, random generators, train and eval mode: saved, and put back
distributed.py      several ranks: whose gradient the ascent climbs, and what ranks must agree on
"""
