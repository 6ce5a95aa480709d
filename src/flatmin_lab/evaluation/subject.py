"""The subject of an evaluation: a classifier, how images become its inputs, and the data it is measured on."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatmin_lab.data.augment.transforms import Augmentation
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.recipes.recipe import PAPER_BATCH_SIZE
from flatmin_lab.system.rng import generator
from flatmin_lab.training.model_check import check_outputs, check_single_output


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, on the device of its data. `split_name` says what `test` is: "test" or "validation"."""

    model: nn.Module
    normalise: Normalisation
    train: Split
    test: Split
    split_name: str = "test"
    augment: Augmentation = field(default_factory=Augmentation)  # of its training
    batch_size: int = PAPER_BATCH_SIZE  # of its training
    notes: tuple[str, ...] = ()  # about what looks odd
    own_data: bool = False  # the user's own, which may be sorted by class; flatmin's data sets are not

    @property
    def device(self) -> torch.device:
        return self.test.x.device

    @property
    def kind(self) -> str:
        return "pictures" if self.test.is_images else "points"

    def splits(self) -> dict[str, Split]:
        return {"training": self.train, self.split_name: self.test}

    def sample(self, split: Split, most: int | None = None) -> Split:
        """At most that many images of a split, the same for every model: the first ones, or random ones of own data."""
        if most is None or most >= len(split):
            return split
        if not self.own_data:
            return Split(split.x[:most], split.y[:most])
        return split.at(torch.randperm(len(split), generator=generator("sample"))[:most].to(split.x.device))

    def inputs(self, split: Split, most: int | None = None) -> tuple[Tensor, Tensor]:
        """A sample of a split as the model takes it, and its labels."""
        chosen = self.sample(split, most)
        return self.normalise(chosen.x), chosen.y

    def with_normalisation(self) -> nn.Module:
        """The model as a function of images from 0 to 1, normalisation included: attacks move pixels."""
        return NormalisingModel(self.model, self.normalise).eval()


class NormalisingModel(nn.Module):
    """A model and what its inputs go through: it takes images as they are."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalise: Normalisation) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", normalise.mean.clone())
        self.register_buffer("std", normalise.std.clone())

    def forward(self, x: Tensor) -> Any:
        return self.model(Normalisation(self.mean, self.std)(x))


def user_subject(
    model: nn.Module, data: Dataset, *, normalised: bool, device: torch.device, own_data: bool = False
) -> Subject:
    """A user's model: it takes images from 0 to 1, or normalised by the training set's mean and standard deviation."""
    here = data.to(device)
    normalise = Normalisation.of(here.train)
    if not normalised:
        normalise = Normalisation(torch.zeros_like(normalise.mean), torch.ones_like(normalise.std))
    if not any(p.requires_grad for p in model.parameters()):  # frozen for use: all of it counts for flatness
        for p in model.parameters():
            p.requires_grad_(p.is_floating_point())
    subject = Subject(model.to(device).eval(), normalise, here.train, here.test, own_data=own_data)
    x, _ = subject.inputs(subject.test, 2)
    notes = check_outputs(subject.model, x, subject.test.kind, data.num_classes)
    check_single_output(subject.model, x, data.num_classes)
    return replace(subject, notes=tuple(notes))
