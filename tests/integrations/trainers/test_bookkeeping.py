"""What a pass counts, appends or replaces in an object's attributes is put back."""

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import torch

from flatmin.integrations.bookkeeping import Bookkeeping


def books() -> Any:
    return SimpleNamespace(
        tokens=5,
        time=0.5,
        metrics={"train": defaultdict(list, loss=[0.7])},
        recent=deque([1, 2], maxlen=2),
        words=Counter("aab"),
        seen={1},
        order=OrderedDict(first=[1], second=[2]),
        mean=torch.tensor(1.0),
    )


def keep(owner: Any) -> None:
    """A loss that keeps every kind of book."""
    owner.tokens += 5
    owner.time *= 2
    owner.metrics["train"]["loss"].append(0.9)
    owner.metrics["train"]["margin"].append(0.1)
    owner.metrics["eval"] = {}
    owner.recent.append(3)
    owner.words.update("bc")
    owner.seen.add(2)
    owner.order["second"] = [3]
    del owner.order["first"]
    owner.mean = owner.mean * 0.9
    owner.new = 1


def test_everything_kept_in_plain_collections_and_numbers_is_put_back() -> None:
    owner, expected = books(), books()
    before = Bookkeeping(owner)
    keep(owner)
    before.put_back()
    assert vars(owner) == vars(expected)
    assert owner.recent.maxlen == 2
    assert owner.metrics["train"]["other"] == []  # a defaultdict still


def test_collections_are_put_back_in_place() -> None:
    owner = books()
    held, losses = owner.metrics, owner.metrics["train"]["loss"]
    before = Bookkeeping(owner)
    keep(owner)
    before.put_back()
    assert owner.metrics is held
    assert owner.metrics["train"]["loss"] is losses
    assert losses == [0.7]


def test_a_tensor_that_counts_in_place_is_put_back() -> None:
    owner = SimpleNamespace(steps=torch.tensor(2), losses={"train": {"steps": torch.tensor([3])}})
    held = owner.losses["train"]["steps"]
    before = Bookkeeping(owner)
    owner.steps += 1
    owner.losses["train"]["steps"] += 1
    before.put_back()
    assert owner.losses["train"]["steps"] is held
    assert (int(owner.steps), int(held)) == (2, 3)


def test_tensors_that_are_large_trained_or_of_inference_are_left_alone() -> None:
    with torch.inference_mode():
        made = torch.tensor(1.0)
    owner = SimpleNamespace(mean=torch.zeros(2), weight=torch.ones(1, requires_grad=True), made=made)
    before = Bookkeeping(owner)
    owner.mean += 1
    with torch.no_grad():
        owner.weight += 1
    before.put_back()
    assert (owner.mean.tolist(), owner.weight.item(), owner.made is made) == ([1.0, 1.0], 2.0, True)


def test_collections_may_hold_themselves_and_be_held_twice() -> None:
    rows: list[Any] = [1]
    rows.append(rows)
    owner = SimpleNamespace(rows=rows, again=rows)
    before = Bookkeeping(owner)
    rows.append(2)
    before.put_back()
    assert len(rows) == 2
    assert owner.again is owner.rows is rows[1] is rows


def test_shallow_attributes_keep_their_name_alone() -> None:
    owner = SimpleNamespace(data=[1], count=1)
    data = owner.data
    before = Bookkeeping(owner, shallow=("data",))
    owner.data.append(2)
    owner.data = None
    before.put_back()
    assert owner.data is data
    assert data == [1, 2]
