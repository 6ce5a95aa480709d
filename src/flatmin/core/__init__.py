"""What every part of the library builds on: tensors, the state of a model, several ranks, CUDA graphs.

tensors.py          arithmetic on lists of tensors without host syncs; `Copies` of tensors, to restore them
multi_tensor.py     many tensors in one launch, through triton_kernels.py where Triton is installed
model_state.py      buffers, random generators, train and eval mode: saved and restored
distributed.py      several ranks: whose gradient the ascent follows, and what must be equal on all ranks
capturable.py       a check for host syncs before a capture, and generators that survive a failed one
messages.py         words for error messages
"""
