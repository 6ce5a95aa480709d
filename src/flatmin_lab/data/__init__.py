"""Data sets as tensors on a device, and batches of them: `load`, `augmentation`, `Normalisation`, `Batches`."""

from flatmin_lab.system.optional_deps import needed_by

with needed_by("flatmin_lab.data"):  # numpy
    from flatmin_lab.data.augment.autoaugment import AutoAugment
    from flatmin_lab.data.augment.transforms import Augmentation, Crop, Cutout, Flip, augmentation
    from flatmin_lab.data.batches import Batches, in_order
    from flatmin_lab.data.dataset import Dataset, Split
    from flatmin_lab.data.normalise import Normalisation
    from flatmin_lab.data.registry import DATA_SETS, load
    from flatmin_lab.data.sources.torch_dataset import from_torch

__all__ = [
    "DATA_SETS",
    "Augmentation",
    "AutoAugment",
    "Batches",
    "Crop",
    "Cutout",
    "Dataset",
    "Flip",
    "Normalisation",
    "Split",
    "augmentation",
    "from_torch",
    "in_order",
    "load",
]
