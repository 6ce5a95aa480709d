"""The protocols: how long a training run is, and which settings it uses.

    paper       200 epochs, as in the paper's published code: on the CIFARs this gives the paper's numbers
    paper-v2    200 epochs, crops and momentum of that code's second version, the rest as in the paper's text
    short       60 epochs, AMP's radius at most 0.1, everything else as in paper-v2
    smoke       3 epochs of narrow networks on synthetic images, otherwise as in paper

The published code has two versions (https://github.com/hiyouga/AMP-Regularizer, commits 63cd647 and a9f6019). The
networks of table 1 were most likely trained with the first: on CIFAR-100 it gives the paper's numbers, and the second
does not. The networks of table 2 are in the second alone, so `paper` follows it there.

                            first version               second version          the paper's text, as we read it
    crops of CIFAR          padded by 2 with black      by 4 with grey          (not said; ours: by 4 with grey)
    momentum                0.9                         0.9, Nesterov's         (not said; ours: 0.9, Nesterov's)
    gradient of the step    clipped to a norm of 50     the same                (not said; ours: as it is)
    SVHN is normalised by   0.5 and 0.5                 mean and std            mean and standard deviation
    AMP's ball              one per tensor              one per tensor          one over all parameters
    RMP                     a cube per tensor           a cube per tensor       uniform in one ball
    adversarial training    1/255 of the normalised inputs, random start        1/255 of the pixel range
    label smoothing         spread over the other classes                       over all classes
    Dropout (PreActResNet)  once per block, and before the classifier           after every ReLU
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from flatmin_lab import methods
from flatmin_lab.data.augment.transforms import Kind

Protocol = Literal["paper", "paper-v2", "short", "smoke"]
NAMES: tuple[Protocol, ...] = get_args(Protocol)
# the paper's tables: the first with its own augmentation, the second with three
TABLE_1, TABLE_2 = ("preactresnet18", "vgg16"), ("wideresnet28_10", "pyramidnet164_270")


class Length(NamedTuple):
    """Of a protocol's runs; `published`: with the settings of the published code, and not of the paper's text."""

    epochs: int
    trials: int
    published: bool


PROTOCOLS: dict[Protocol, Length] = {
    "paper": Length(200, 10, published=True),
    "paper-v2": Length(200, 10, published=False),
    "short": Length(60, 3, published=False),
    "smoke": Length(3, 3, published=True),
}
PAPER_LENGTH = tuple(name for name, length in PROTOCOLS.items() if length.epochs == 200)  # the paper's numbers compare
PUBLISHED_SETTINGS: dict[str, dict[str, Any]] = {  # of both versions, where they are not the paper's text's
    "amp": {"ball": "tensor"},
    "rmp": {"ball": "tensor", "noise": "cube"},
    "adversarial": {"units": "inputs", "random_start": True},
    "label_smoothing": {"over": "others"},
}
PUBLISHED_CLIP_NORM = 50.0


@dataclass(frozen=True)
class FollowedProtocol:
    """The protocol that a recipe follows, and how it differs from it; `str()` makes the sentence.

    >>> str(FollowedProtocol("paper", settings=("ball global",), others=("400 epochs",)))
    'paper, but ball global, 400 epochs'
    >>> FollowedProtocol.read("paper, but ball global, 400 epochs")
    FollowedProtocol(name='paper', settings=('ball global',), others=('400 epochs',))
    """

    name: str
    settings: tuple[str, ...] = ()  # the method's that differ
    others: tuple[str, ...] = ()

    @property
    def exceptions(self) -> tuple[str, ...]:
        return self.settings + self.others

    def __str__(self) -> str:
        return f"{self.name}, but {', '.join(self.exceptions)}" if self.exceptions else self.name

    @staticmethod
    @cache
    def read(text: str) -> "FollowedProtocol":
        """Of a result file, which holds the sentence."""
        found = list(filter(None, text.partition(", but ")[2].split(", ")))
        known = {key for method in methods.METHODS for key in methods.setting_names(method)}
        settings = tuple(one for one in found if one.partition(" ")[0] in known)
        return FollowedProtocol(text.partition(",")[0], settings, tuple(one for one in found if one not in settings))


OWN = FollowedProtocol("own")


def kind_of(augment: Kind) -> Kind:
    """What a table calls an augmentation, whichever version of the crops it uses.

    >>> kind_of("vanilla_v1"), kind_of("cutout")
    ('vanilla', 'cutout')
    """
    return "vanilla" if augment == "vanilla_v1" else augment


def recipe_fields(protocol: Protocol, data: str, model: str, method: str, kind: Kind = "vanilla") -> dict[str, Any]:
    """The fields of a recipe that a cell of the paper's tables has under a protocol, where they are not the defaults.

    >>> recipe_fields("paper", "svhn", "preactresnet18", "erm")
    {'augment': 'vanilla_v1', 'clip_norm': 50.0, 'nesterov': False, 'normalise': (0.5, 0.5)}
    """
    found: dict[str, Any] = {"augment": kind}
    if not PROTOCOLS[protocol].published:
        return found
    found["clip_norm"] = PUBLISHED_CLIP_NORM
    if model in TABLE_1 and kind == "vanilla":
        found |= {"augment": "vanilla_v1", "nesterov": False}
        found |= {"normalise": (0.5, 0.5)} if data == "svhn" else {}
        found |= {"model_settings": {"dropout_at": "block"}} if (model, method) == (TABLE_1[0], "dropout") else {}
    return found


def method_settings(protocol: Protocol, method: str) -> dict[str, Any]:
    """A method's settings under a protocol, where they are not its defaults; AMP's radius comes from the recipe."""
    return dict(PUBLISHED_SETTINGS.get(method, {})) if PROTOCOLS[protocol].published else {}
