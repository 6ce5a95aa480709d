"""Lightning's names, from whichever package is installed: `lightning`, or the older `pytorch_lightning`."""

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ModuleNotFoundError:  # the same package under its older name
    import pytorch_lightning as pl  # type: ignore[no-redef]
    from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder  # type: ignore[assignment]
    from pytorch_lightning.core.optimizer import LightningOptimizer  # type: ignore[assignment]
    from pytorch_lightning.plugins.precision import MixedPrecision, Precision  # type: ignore[assignment]
    from pytorch_lightning.strategies import (  # type: ignore[assignment]
        DDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
    )
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "BatchSizeFinder",
    "DDPStrategy",
    "LearningRateFinder",
    "LightningOptimizer",
    "MixedPrecision",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "Precision",
    "SingleDeviceStrategy",
    "is_param_in_hook_signature",
    "pl",
]
