"""What `FlatMinima` cannot do with a Trainer, said before the training begins."""

from flatmin.integrations.lightning_package import (
    DDPStrategy,
    MixedPrecision,
    ModelParallelStrategy,
    Precision,
    SingleDeviceStrategy,
    is_param_in_hook_signature,
    pl,
)
from flatmin.optim.radius import RadiusScheduler


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            f"FlatMinima is a callback for the Trainer of {pl.__name__}, got that of {type(trainer).__module__}; "
            f"write `import {pl.__name__} as pl`"
        )
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    known = Precision.optimizer_step, MixedPrecision.optimizer_step
    averages = getattr(strategy, "_model_averager", None) is not None  # post-local SGD, in DDP's optimizer_step
    if (
        not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
        or averages
        or type(plugin).optimizer_step not in known
    ):
        raise ValueError(
            "FlatMinima works on one device, with DDP that averages gradients or with ModelParallelStrategy, and "
            f"with their precision plugins, got {type(strategy).__name__} with {type(plugin).__name__}; for others "
            "write your own loop with flatmin.AMP"
        )
    if module.automatic_optimization and is_param_in_hook_signature(
        module.training_step, "dataloader_iter", explicit=True
    ):
        raise ValueError(
            "training_step(self, dataloader_iter) takes a new batch each time it is called, but a perturbed pass needs "
            "the same one; write training_step(self, batch, batch_idx)"
        )


def check_schedulers(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Lightning steps schedulers once per epoch, unless told otherwise: a radius would never get to its start."""
    if not module.automatic_optimization or trainer.fast_dev_run:  # stepped by the module; or not to the end anyway
        return
    per_epoch = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "epoch"]
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs  # -1: without a limit
    for scheduler in per_epoch:
        if isinstance(scheduler, RadiusScheduler) and 0 <= epochs < scheduler.total_steps:
            raise ValueError(
                f"this RadiusScheduler has total_steps={scheduler.total_steps}, but Lightning would step it once per "
                f"epoch, {epochs} times; return it from configure_optimizers as "
                '{"scheduler": scheduler, "interval": "step"}'
            )
