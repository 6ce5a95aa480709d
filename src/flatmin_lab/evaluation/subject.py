"""What is examined: a classifier, how pictures are made into its inputs, and the data to examine it with."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.normalise import Normalisation


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, on the device of its data. `which`: what the test split is, "test" or "validation"."""

    model: nn.Module
    normalise: Normalisation
    train: Split
    test: Split
    split_name: str = "test"
    notes: tuple[str, ...] = ()  # what looks odd

    @property
    def device(self) -> torch.device:
        return self.test.x.device

    @property
    def kind(self) -> str:
        return "pictures" if self.test.pictures else "points"

    def splits(self) -> dict[str, Split]:
        return {"training": self.train, self.split_name: self.test}

    def inputs(self, split: Split, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The first pictures of a split as the model takes them, and their labels."""
        return self.normalise(split.x[:most]), split.y[:most]

    def with_normalisation(self) -> nn.Module:
        """The model as a function of pictures from 0 to 1, the normalisation inside: an attack moves pixels."""
        return _NormalisingModel(self.model, self.normalise).eval()


class _NormalisingModel(nn.Module):
    def __init__(self, model: nn.Module, normalise: Normalisation) -> None:
        super().__init__()
        self.model, self.normalise = model, normalise

    def forward(self, x: Tensor) -> Any:
        return self.model(self.normalise(x))


def user_subject(model: nn.Module, data: Dataset, *, normalised: bool, device: torch.device) -> Subject:
    """A model of one's own: it takes pictures from 0 to 1, or normalised by the training set's mean and deviation."""
    here = data.to(device)
    normalise = Normalisation.of(here.train)
    if not normalised:
        normalise = Normalisation(torch.zeros_like(normalise.mean), torch.ones_like(normalise.std))
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())  # frozen layers are part of the landscape too
    subject = Subject(model.to(device).eval(), normalise, here.train, here.test)
    return replace(subject, notes=_check_outputs(subject, data.num_classes))


def _check_outputs(subject: Subject, classes: int) -> tuple[str, ...]:
    """Whether the model takes the data, and answers with logits; what looks odd about them."""
    x, _ = subject.inputs(subject.test, 2)
    try:
        with torch.no_grad():
            answer = subject.model(x)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"the model does not take {subject.test.kind}: {error}") from error
    shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    if not isinstance(answer, Tensor) or answer.ndim != 2 or answer.shape[1] < classes:
        raise ValueError(
            f"the model must answer {len(x)} inputs with logits ({len(x)}, K) for K = {classes} classes, got {shape}"
        )
    notes = []
    if answer.shape[1] > classes:
        notes.append(f"the model has {answer.shape[1]} outputs, and the data {classes} classes")
    if bool((answer >= 0).all()) and torch.allclose(answer.sum(dim=1), torch.ones_like(answer[:, 0]), atol=1e-3):
        notes.append("its answers look like probabilities; give logits, before softmax")
    return tuple(notes)
