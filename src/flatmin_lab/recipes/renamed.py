"""What recipes were called before `paper` became the recipe of the published code's first version.

    paper/NAME            is now paper-v2/NAME      the recipe is the same, after the second version
    paper/NAME-v1         is now paper/NAME         after the first

The recipes of the spiral and the digits, which both versions share, have kept their names.
Run folders and results that carry an old name are still read: a recipe, and not its name, says what was trained.
"""

OLD, NEW = "paper/", "paper-v2/"
FIRST_VERSION = "-v1"
NOT_RENAMED = ("paper/spiral-", "paper/digits-")


def name_now(old: str) -> str | None:
    """What a recipe of that old name may be called now; None if it was never renamed.

    >>> name_now("paper/cifar10-vgg16-erm"), name_now("paper/cifar10-vgg16-erm-v1"), name_now("short/cifar10-vgg16-erm")
    ('paper-v2/cifar10-vgg16-erm', 'paper/cifar10-vgg16-erm', None)
    """
    if not old.startswith(OLD) or old.startswith(NOT_RENAMED):
        return None
    return old.removesuffix(FIRST_VERSION) if old.endswith(FIRST_VERSION) else f"{NEW}{old.removeprefix(OLD)}"
