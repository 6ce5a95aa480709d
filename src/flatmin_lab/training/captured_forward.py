"""A model's forward pass in eval mode, replayed as a CUDA graph for full batches.

A run evaluates its model after every epoch, always with the same weight tensors: their values change, their memory does
not. So the forward pass of a full batch is captured once for the whole run; the last, smaller batch of a split runs
eagerly, and so does everything on a CPU. The kernels are the same, and so are the bits.
"""

import torch
from torch import Tensor, nn

from flatmin.core.capturable import capturable_generator, no_host_sync
from flatmin.core.model_state import eval_mode
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation

EVAL_BATCH_SIZE = 500  # images; the size of batch that is captured
WARMUP_PASSES = 3  # before a capture: cuDNN searches for algorithms, and memory is allocated


class CapturedForward:
    """A function from inputs to logits: the model in eval mode, without gradients.

    >>> model = nn.Sequential(nn.Dropout(0.5), nn.Flatten())
    >>> CapturedForward(model)(torch.ones(1, 1, 2)), model.training
    (tensor([[1., 1.]]), True)
    """

    def __init__(self, model: nn.Module, *, batch_size: int = EVAL_BATCH_SIZE, capture: bool = True) -> None:
        self.model, self.batch_size, self.capture = model, batch_size, capture
        self.graph: torch.cuda.CUDAGraph | None = None
        self._captured_for: object = None  # input layout and weight addresses that the graph was captured with

    def prepare(self, split: Split, normalise: Normalisation) -> None:
        """Capture now rather than at the first evaluation, so that its memory is reserved from the start."""
        if self.capture and split.x.is_cuda and len(split) >= self.batch_size:
            self(normalise(split.x[: self.batch_size]))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if not self.capture or not x.is_cuda or len(x) != self.batch_size:
            return self._run_eager(x)
        if self._captured_for != (signature := self._signature(x)):
            self._captured_for, self.graph = signature, None
            self._capture(x)
        if self.graph is None:
            return self._run_eager(x)
        self.x.copy_(x)
        self.graph.replay()
        return self.logits.clone()

    def _run_eager(self, x: Tensor) -> Tensor:
        with eval_mode(self.model):
            logits: Tensor = self.model(x)
        return logits

    def _signature(self, x: Tensor) -> object:
        tensors = (*self.model.parameters(), *self.model.buffers())
        return x.shape, x.stride(), x.dtype, x.device, [tensor.data_ptr() for tensor in tensors]

    def _capture(self, x: Tensor) -> None:
        """Capture a pass; a model that cannot be captured runs eagerly. Running out of memory is not hidden."""
        self.x = x.clone()
        stream, graph = torch.cuda.Stream(x.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(x.device))
        try:
            self._warm_up(stream)
            with (
                capturable_generator(torch.cuda.default_generators[x.device.index or 0], x.device),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.logits = self._run_eager(self.x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return
        self.graph = graph

    def _warm_up(self, stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_PASSES):
                    self._run_eager(self.x)
                with no_host_sync():
                    self._run_eager(self.x)
        finally:  # also after an error: kernels already started read x and the weights
            torch.cuda.current_stream(self.x.device).wait_stream(stream)
