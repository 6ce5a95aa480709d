"""Everything that changes while a model is trained (weights, optimizer, EMA, random states), and a step of it.

Ordinary training is AMP with a radius of 0, which is the base optimizer itself, bit for bit. So there is one form of a
step for every method and precision, `flatmin.captured_step`. Its inputs are the indices of a batch and their random
numbers; the rest runs on the device, on a GPU as the replay of one CUDA graph:

    x, y = batches.at(index, u)
    x, target = regulariser.batch(model, x, y)
    optimizer.step(closure, scaler=scaler)

The initial weights and random state depend on the seed alone, and are made on the CPU: every method, on every device,
starts with the same ones. `tensors` and `state` are what a checkpoint holds, and `load` restores them.

On several ranks (`join`) each learner computes its shard of every step, and all stay equal: see data_parallel.py.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import flatmin
from flatmin.core.random_state import random_state, set_random_state
from flatmin.optim import PerturbedOptimizer
from flatmin.optim.radius import MatchedRadius, radii_of, scale_radii
from flatmin.regularisers import Mixed, Regulariser
from flatmin_lab import methods
from flatmin_lab.data.batches import Batches
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.models.weights import constant_buffers, load_unsaved_buffers, unsaved_buffers
from flatmin_lab.recipes.recipe import Recipe, differences
from flatmin_lab.recipes.user_files import has_user_code
from flatmin_lab.runs.checkpoint import Checkpoint
from flatmin_lab.system.host_rng import host_state, seed_host, set_host_state
from flatmin_lab.system.rng import generator, generator_devices, seed_generators
from flatmin_lab.training.build import build_method, build_model, load_initial_weights
from flatmin_lab.training.data_parallel import BatchSharding
from flatmin_lab.training.ema import EMA
from flatmin_lab.training.model_check import check_saveable
from flatmin_lab.training.optimizer import IMPLEMENTATION, build_optimizer, check_by_parameter, check_plain
from flatmin_lab.training.ranks import RankGroup

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """A model in training. Its random numbers come from the device's default generator."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        batches: Batches,
        *,
        seed: int,
        device: torch.device,
        capture: bool = True,
        initial: bool = True,
    ) -> None:
        """With `initial`, the recipe's initial weights are read; a checkpoint replaces them anyway."""
        self.recipe, self.batches, self.device, self.capture = recipe, batches, device, capture
        self.has_user_code = has_user_code(recipe)
        self.method = build_method(recipe, batches.normalise)
        seed_generators([torch.device("cpu")], generator("weights", seed).initial_seed())
        if self.has_user_code:
            seed_host(generator("weights on the host", seed).initial_seed())
        self.model = build_model(recipe, data, self.method)
        if initial and recipe.init is not None:
            load_initial_weights(recipe, self.model)
        self.model.to(device)
        check_saveable(self.model, recipe.model)
        seed_generators(generator_devices(self.device), generator("training", seed).initial_seed())
        if self.has_user_code:
            seed_host(generator("training on the host", seed).initial_seed())
        self.scaler = GradScaler(device.type, enabled=recipe.precision == "fp16")
        self.ema = None if recipe.ema is None else EMA(self.model, decay=recipe.ema)
        self.constants = constant_buffers(self.model)
        self.notes: list[str] = []  # why steps are not captured or compiled, although they should be
        self.sharding: BatchSharding | None = None
        self._assemble(self.model, None)

    def _assemble(self, model: nn.Module, sharding: BatchSharding | None) -> None:
        """Build the step of the model, which with `sharding` is wrapped in DistributedDataParallel."""
        recipe, regulariser = self.recipe, self.method.regulariser
        base = build_optimizer(recipe, self.model)
        self.rates = [
            group["lr"] / recipe.lr for group in base.param_groups
        ]  # of each group, relative to the peak rate
        wrapped = self.method.wrap(base, model)
        self.optimizer = wrapped if isinstance(wrapped, PerturbedOptimizer) else flatmin.AMP(base, epsilon=0.0)
        batch: Any = _make_batch(self.model, self.batches, regulariser, channels_last=recipe.channels_last)
        if sharding is not None:
            attacked = self.model if regulariser.name == "adversarial" else None
            batch = sharding.batch_of(
                batch, self.batches.split.y, is_mixup=regulariser.name == "mixup", attacked=attacked
            )
        self.train_step = flatmin.captured_step(
            model,
            _make_loss(regulariser, sharding),
            self.optimizer,
            autocast=AUTOCAST.get(recipe.precision),
            compile=recipe.compile,
            batch=batch,
            ascent=_make_ascent(self.method.ascent_share),
            scaler=self.scaler,
            capture=self.capture,
        )
        self.train_step.say = self.notes.append
        self.radii = radii_of(self.optimizer)
        self.matched: MatchedRadius | None = None
        if recipe.is_matched and isinstance(self.optimizer, flatmin.AMP):
            self.matched = MatchedRadius(self.optimizer, scheduler=self)

    def set_radii(self, radii: Sequence[float]) -> None:
        """Each step uses a share of these."""
        self.radii = list(radii)

    def rehearse(self, ranks: RankGroup) -> None:
        """On several ranks, before they join: try this rank's shard of a step."""
        if ranks.size > 1:
            if self.method.ascent_share < 1:
                raise ValueError(
                    f"ascent_share works in a single process only, got ascent_share {self.method.ascent_share} and "
                    f"{ranks.size} processes; leave it out"
                )
            self.sharding = BatchSharding(ranks, self.device)
            self.sharding.rehearse(self.train_step.spec, *next(self.batches.parts(0)))

    def join(self) -> None:
        """Connect to the other ranks; all ranks call it, once all have rehearsed."""
        if self.sharding is not None:
            self._assemble(self.sharding.replicate(self.train_step.spec), self.sharding)

    def step(self, index: Tensor, u: Tensor, lr: float, share: float = 1.0) -> dict[str, Tensor]:
        """One step on the batch of these images, with that share of ε; what it measured, as tensors on the device.

        If the ascent uses only a share of the batch, loss and error are those at θ + Δ.
        """
        for group, share_of_lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * share_of_lr
        scale_radii(self.optimizer, self.radii, share)
        loss, error = self.train_step(index, u)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return self._measured(loss, error)

    def _measured(self, loss: Tensor, error: Tensor) -> dict[str, Tensor]:
        measured, last = {"loss": loss, "error": error}, self.optimizer.last
        # RMP has no pass at θ; an ascent on a share of the batch has none with all images
        if last.loss is not None and last.loss_perturbed is not None and isinstance(self.optimizer, flatmin.AMP):
            measured["sharpness"] = last.loss_perturbed - last.loss
        for name in ("delta_norm", "grad_norm", "on_ball", "skipped"):
            if (value := getattr(last, name)) is not None:
                measured[name] = value
        if self.sharding is not None and not self.optimizer.sync_perturbation:
            return self.sharding.mean(measured)
        return measured

    def is_finite(self) -> bool:
        """Are all weights and statistics finite? A buffer that never was, such as a mask with −∞, does not count."""
        known = self.model.state_dict().items()
        tensors = [t for name, t in known if t.is_floating_point() and name not in self.constants]
        return bool(torch.stack([t.isfinite().all() for t in tensors]).all())

    # ---- checkpoints

    def tensors(self) -> dict[str, Tensor]:
        optimizer = self.optimizer.state_dict()["state"]
        parts: dict[str, Mapping[str, Any]] = {
            "model": self.model.state_dict(),
            "buffers": unsaved_buffers(self.model),
            "optimizer": {f"{i}.{key}": value for i, values in optimizer.items() for key, value in values.items()},
            "random": {device.type: random_state(device) for device in generator_devices(self.device)},
        }
        if self.ema is not None:
            parts |= {"average": self.ema.state_dict(), "average_buffers": unsaved_buffers(self.ema)}
        named = {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def state(self) -> dict[str, Any]:
        """The state of optimizer and scaler that is not tensors."""
        optimizer = self.optimizer.state_dict()
        check_by_parameter(optimizer["state"], self.recipe.optimizer)
        numbers = {
            str(i): {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            for i, values in optimizer["state"].items()
        }
        check_plain([*numbers.values(), *optimizer["param_groups"]], self.recipe.optimizer)
        found = {"optimizer": {**optimizer, "state": numbers}, "scaler": self.scaler.state_dict()}
        if self.matched is not None:
            found["matched"] = {"rule": self._matching_rule(), "radii": self.radii, **self.matched.state_dict()}
        if self.has_user_code:
            found["host_random"] = host_state()
        return found

    def load(self, checkpoint: Checkpoint, *, of_other: bool = False) -> None:
        """Restore a checkpoint in place, so the weights keep their storage and memory format.

        Of another run that has not perturbed a step yet, all but what belongs to its perturbation: ζ and what a matched
        ε is adjusted by stay this run's own, and ε is 0 in both until the first step that is perturbed.
        """
        if not of_other:
            self._check_rule(checkpoint)
        self.model.load_state_dict(checkpoint.part("model"))
        load_unsaved_buffers(self.model, checkpoint.part("buffers"))
        self.constants = constant_buffers(self.model)
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint.part("average"))
            load_unsaved_buffers(self.ema, checkpoint.part("average_buffers"))
            self.ema.constants = constant_buffers(self.ema.module)
        saved = checkpoint.state["optimizer"]
        state = {int(i): dict(values) for i, values in saved["state"].items()}
        for name, tensor in checkpoint.part("optimizer").items():
            i, _, key = name.partition(".")
            state.setdefault(int(i), {})[key] = tensor
        own = (*IMPLEMENTATION, "inner_lr") if of_other else IMPLEMENTATION
        groups = [
            _adapted(then, now, own)
            for now, then in zip(self.optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({**saved, "param_groups": groups, "state": state})
        self._keep_dtypes(state)
        self._lay_out_moments()
        self.scaler.load_state_dict(checkpoint.state["scaler"])
        if self.matched is not None and not of_other:
            known = dict(checkpoint.state["matched"])
            del known["rule"]
            self.set_radii(known.pop("radii"))
            self.matched.load_state_dict(known)
        random = checkpoint.part("random")
        for device in generator_devices(self.device):
            if device.type in random:  # not if training resumes on another kind of device
                set_random_state(device, random[device.type])
        if self.has_user_code and "host_random" in checkpoint.state:  # earlier checkpoints have none
            set_host_state(checkpoint.state["host_random"])

    def _matching_rule(self) -> dict[str, int]:
        """What a matched radius depends on besides the recipe: defaults that may differ in another version."""
        held_out = self.batches.held_out
        images, epochs = (0, 0) if held_out is None else (len(held_out.indices), held_out.epochs)
        return {"version": methods.AUTO_RULE, "held_out_images": images, "epochs": epochs}

    def _check_rule(self, checkpoint: Checkpoint) -> None:
        if self.matched is None:
            return
        here = self._matching_rule()
        there = checkpoint.state["matched"].get("rule", {**here, "version": 1})  # the first version recorded none
        if here != there:
            raise ValueError(
                f"this run adjusts its radius (epsilon auto) by a different rule: "
                f"{'; '.join(differences(there, here))}. Resume it with the flatmin that started it, or train it "
                "again: move its folder away, or choose another with --out"
            )

    def _keep_dtypes(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Give the state its own types again: torch's `load_state_dict` casts it to those of the weights."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        for place, values in saved.items():
            own = self.optimizer.state[params[place]]
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(own.get(key), Tensor) and own[key].dtype != value.dtype:
                    own[key] = value.to(own[key].device)

    def _lay_out_moments(self) -> None:
        """Give momentum the weights' memory format (channels-last), which a file does not keep: mixed ones are slow."""
        for param, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                    values[key] = torch.empty_like(param, dtype=value.dtype).copy_(value)


def _adapted(saved: Mapping[str, Any], now: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """A group from JSON, with tuples (AdamW's betas) where the group has them, and its `own` settings as they are now.

    Its own is at least this device's implementation.
    """
    known = {key: tuple(value) if isinstance(now.get(key), tuple) else value for key, value in saved.items()}
    return {**known, **{key: now[key] for key in own if key in now}}


# ---- a step's functions, without a reference to the learner: a graph that held it would be freed late


def _make_batch(
    model: nn.Module, batches: Batches, regulariser: Regulariser, *, channels_last: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Any]]:
    def batch(index: Tensor, u: Tensor) -> tuple[Tensor, Any]:
        with torch.autocast(
            index.device.type, enabled=False
        ):  # images are normalised in float32, whatever the precision
            x, y = batches.at(index, u)
        if channels_last and x.ndim == 4:
            x = x.to(memory_format=torch.channels_last)
        return regulariser.batch(model, x, y)

    return batch


def _make_ascent(share: float) -> Callable[..., tuple[Any, ...]] | None:
    """The first images of a batch, which is in random order; at least two, for BatchNorm."""
    if share == 1:
        return None

    def ascent(*batch: Any) -> tuple[Any, ...]:
        count = max(math.ceil(share * len(batch[0])), 2)
        return tuple(part[:count] for part in batch)

    return ascent


def _make_loss(regulariser: Regulariser, sharding: BatchSharding | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function for loss and error of the batch, which torch.compile can take."""
    loss = regulariser.loss

    def loss_and_error(model: nn.Module, x: Tensor, target: Tensor | Mixed, *part: slice) -> tuple[Tensor, Tensor]:
        logits = model(x) if sharding is None else sharding.logits(model, x, part[0], len(_labels(target)))
        wrong = logits.detach().argmax(dim=1) != _labels(target)
        return loss(logits.float(), target), wrong.float().mean()

    return loss_and_error


def _labels(target: Tensor | Mixed) -> Tensor:
    """The label with the larger share."""
    return torch.where(target.share >= 0.5, target.y, target.partner) if isinstance(target, Mixed) else target
