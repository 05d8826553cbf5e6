"""What a checkpoint consists of: from the objects of a training script to one state, and back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cacheloader.checkpoint import randomness
from cacheloader.checkpoint.staging import plain_copy
from cacheloader.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

logger = logging.getLogger(__name__)

_PLAIN = "cacheloader.plain"
"""First half of a tuple that hides a plain value from torch, which would take dicts and lists apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The objects whose state is saved.

    Attributes:
        modules: By name, sharded or not; at least ``model``.
        optimizers: Of ``model``.
        others: By name; anything with ``state_dict`` and ``load_state_dict``, the same on every rank.
    """

    modules: Mapping[str, nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, other in self.others.items():
            missing = [method for method in ("state_dict", "load_state_dict") if not hasattr(other, method)]
            if missing:
                raise ConfigError(
                    f"{name}={type(other).__name__} has no {missing[0]}(); pass a module, or an object with "
                    "state_dict() and load_state_dict()"
                )
        taken = {"optimizer", "progress", "rng"} & {*self.modules, *self.others}
        if taken:
            raise ConfigError(f"the name {min(taken)!r} is used by the checkpoint itself; pass the object as another")

    @property
    def is_fresh(self) -> bool:
        """Whether no optimizer has taken a step yet.

        torch makes up the state of such an optimizer by taking a step with zero gradients, which leaves its step count
        at 1; so it is not asked for it.
        """
        return not any(optimizer.state for optimizer in self.optimizers)


def capture(contents: Contents, *, step: int, rank: int) -> dict[str, Any]:
    """The state of a job on this rank; tensors are those in use, everything else is copied.

    Raises:
        ConfigError: An object's state is no plain data.
    """
    state: dict[str, Any] = {name: get_model_state_dict(module) for name, module in contents.modules.items()}
    if contents.optimizers and not contents.is_fresh:
        state["optimizer"] = get_optimizer_state_dict(contents.modules["model"], contents.optimizers)
    state["rng"] = {str(rank): (_PLAIN, randomness.capture())}
    if rank == 0:
        progress = {"step": step, "optimizer_is_fresh": contents.is_fresh}
        if contents.is_fresh:  # plain SGD is so for ever, and its learning rate changes all the same
            progress["optimizer_groups"] = plain_copy(_groups(contents), name="optimizer")
        state["progress"] = (_PLAIN, progress)
        for name, other in contents.others.items():
            state[name] = (_PLAIN, plain_copy(other.state_dict(), name=name))
    return state


def buffers(contents: Contents, state: Mapping[str, Any]) -> frozenset[str]:
    """Names of the tensors in a state that are no parameters but buffers, which may differ between ranks."""
    found = set()
    for name, module in contents.modules.items():
        memory = {(buffer.data_ptr(), buffer.shape) for buffer in module.buffers() if not hasattr(buffer, "placements")}
        for path, value in _leaves(state[name], name):
            is_whole = isinstance(value, torch.Tensor) and not hasattr(value, "placements")  # no DTensor
            if is_whole and (value.data_ptr(), value.shape) in memory:
                found.add(path)
    return frozenset(found)


def template(contents: Contents, metadata: Metadata, *, rank: int, world_size: int, saved_ranks: int) -> dict[str, Any]:
    """A state with a place for everything that this rank takes from a checkpoint.

    Raises:
        CheckpointError: The checkpoint lacks something, or has more than there is a place for.
    """
    saved = set(metadata.state_dict_metadata)
    state: dict[str, Any] = {name: get_model_state_dict(module) for name, module in contents.modules.items()}
    for name in contents.modules:
        _compare(name, {path for path, _ in _leaves(state[name], name)}, _below(saved, name))
        if rank == 0:
            _warn_of_other_types(state[name], name, metadata)
    if contents.optimizers and _below(saved, "optimizer"):
        state["optimizer"] = get_optimizer_state_dict(contents.modules["model"], contents.optimizers)
        _prune(state["optimizer"], saved)
        _compare(
            "optimizer", {path for path, _ in _leaves(state["optimizer"], "optimizer")}, _below(saved, "optimizer")
        )
    source = rank if world_size == saved_ranks else 0
    state["rng"] = {str(source): (_PLAIN, None)}
    for name in ("progress", *contents.others):
        if name not in saved:
            raise CheckpointError(
                f"the checkpoint has no state of {name}, only of {', '.join(sorted(_tops(saved)))}; leave {name}= out "
                "to resume without it"
            )
        state[name] = (_PLAIN, None)
    return state


def apply(contents: Contents, state: Mapping[str, Any], *, rank: int, world_size: int, saved_ranks: int) -> int:
    """Put a loaded state into the objects.

    Those that may refuse it come first, the random states last, since everything before may draw.

    Returns:
        The step.
    """
    progress = _plain(state["progress"])
    for name, other in contents.others.items():
        other.load_state_dict(_plain(state[name]))
    for name, module in contents.modules.items():
        set_model_state_dict(module, state[name])
    if "optimizer" in state:
        # Not strict: a parameter that never got a gradient has no state. All else was compared with the template.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(contents.modules["model"], contents.optimizers, state["optimizer"], options=options)
    elif contents.optimizers and not progress["optimizer_is_fresh"]:
        raise CheckpointError("the checkpoint was saved without an optimizer; leave optimizer= out to resume from it")
    elif contents.optimizers:
        _set_groups(contents, progress.get("optimizer_groups"))
    if world_size == saved_ranks:
        randomness.restore(_plain(state["rng"][str(rank)]))
    else:
        randomness.derive(_plain(state["rng"]["0"]), rank=rank, world_size=world_size)
    return int(progress["step"])


def _groups(contents: Contents) -> list[list[dict[str, Any]]]:
    """Of each optimizer and group of parameters everything but the parameters, the learning rate first of all."""
    return [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in contents.optimizers
    ]


def _set_groups(contents: Contents, saved: list[list[dict[str, Any]]] | None) -> None:
    if not saved:  # saved without an optimizer, or by a release that did not keep them
        return
    if [[set(group) for group in groups] for groups in _groups(contents)] != [list(map(set, one)) for one in saved]:
        raise CheckpointError(
            "the checkpoint does not fit optimizer: its groups or their settings are others; resume with the optimizer "
            "that it was saved from"
        )
    for optimizer, groups in zip(contents.optimizers, saved, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def _plain(value: Any) -> Any:
    tag, inner = value
    if tag != _PLAIN:
        raise CheckpointError(f"the checkpoint holds {tag!r} where cacheloader would have written plain data")
    return inner


def _tops(saved: set[str]) -> set[str]:
    return {path.partition(".")[0] for path in saved}


def _below(saved: set[str], name: str) -> set[str]:
    return {path for path in saved if path.startswith(name + ".")}


def _compare(name: str, wanted: set[str], found: set[str]) -> None:
    for paths, words in ((wanted - found, "lacks"), (found - wanted, "has")):
        if paths:
            raise CheckpointError(
                f"the checkpoint does not fit {name}: it {words} {min(paths)}"
                + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
                + ("" if words == "lacks" else f", for which {name} has no place")
                + "; resume with the model and optimizer that it was saved from"
            )


def _warn_of_other_types(state: Mapping[str, Any], name: str, metadata: Metadata) -> None:
    """Loading converts and says nothing; a model that came back in fewer bits is another model."""
    others = []
    for path, value in _leaves(state, name):
        properties = getattr(metadata.state_dict_metadata[path], "properties", None)
        if properties is not None and isinstance(value, torch.Tensor) and properties.dtype != value.dtype:
            others.append((path, properties.dtype, value.dtype))
    if others:
        path, was, now = others[0]
        logger.warning(
            "%s was saved as %s and is loaded as %s%s; make the model in the type it was saved in to resume exactly",
            path,
            was,
            now,
            f", {len(others) - 1} more likewise" if others[1:] else "",
        )


def _prune(optimizer: dict[str, Any], saved: set[str]) -> None:
    """Leave out states that torch made up for parameters which never got a gradient."""
    states = optimizer.get("state", {})
    for parameter in [key for key in states if not _below(saved, f"optimizer.state.{key}")]:
        del states[parameter]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Paths as torch names them: it takes dicts apart, and lists that hold tensors or dicts."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(part, torch.Tensor | dict) for part in value):
        for place, part in enumerate(value):
            yield from _leaves(part, f"{path}.{place}")
    else:
        yield path, value
