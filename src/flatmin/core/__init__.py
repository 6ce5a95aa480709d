"""What every part of the library builds on: tensors, the state of a model, several ranks, CUDA graphs.

tensors.py          arithmetic on lists of tensors without host syncs
copies.py           copies of tensors, kept from step to step and restored
multi_tensor.py     many tensors in one launch
triton_kernels.py   its launches where Triton is installed
recorded_launches.py   launches that recur in every step, recorded and replayed
recurring_work.py   a piece of a step's work, recorded if it recurs with the same tensors
packed_tensors.py   the results of a replay, copied out at once
model_state.py      buffers, random states, train and eval mode: saved and restored
random_state.py     the states of random generators, of devices and of the host
distributed.py      several ranks: whose gradient the ascent follows, and what must be equal on all ranks
capturable.py       a check for host syncs before a capture, and generators that survive a failed one
messages.py         words for error messages
"""
