"""Checks of a call's inputs before any work. On the host always; on the device only with `checks="full"`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from vit_compile.backend.program import AttentionCall
from vit_compile.backend.roles import RoleTable
from vit_compile.backend.sizes import Env
from vit_compile.errors import BoundariesError, BoundError, InputMismatchError


def check_call(roles: RoleTable, args: Sequence[Any], env: Env, *, read_device: bool, padded: bool = False) -> None:
    """Raise an error of the catalogue when a call's inputs cannot give right numbers.

    Boundaries on the host are always read; those on a device only with `read_device`, which synchronises. `padded`: the caller
    has padded the rows itself, so that boundaries may end before the last one.
    """
    for role in roles.inputs:
        value = args[role.arg]
        if value.dtype != role.spec.dtype or value.device.type != role.spec.device.type or not _fits(value.shape, role.fixed):
            raise InputMismatchError(
                f"{role.name} is {value.dtype} {list(value.shape)} on {value.device}, but the graph was traced for {role.spec}: "
                "convert it, or compile the model anew."
            )
    for arg, calls in roles.boundary_calls.items():
        value = args[arg]
        if read_device or value.device.type == "cpu":
            check_boundaries(value.tolist(), roles.boundary_rows(arg, env), name=_name(roles, arg), padded=padded)
            longest = int((value[1:] - value[:-1]).max()) if value.numel() > 1 else 0
            check_bounds(longest, calls, env, name=_name(roles, arg))


def _fits(shape: torch.Size, fixed: tuple[int, ...]) -> bool:
    """Has a shape the traced number of dimensions and the traced sizes (-1: any)?"""
    return len(shape) == len(fixed) and all(want in (-1, have) for have, want in zip(shape, fixed, strict=True))


def _name(roles: RoleTable, arg: int) -> str:
    return next((role.name for role in roles.inputs if role.arg == arg), f"argument {arg}")


def check_boundaries(offsets: list[int], rows: int, *, name: str = "cu_seqlens", padded: bool = False) -> None:
    """Raise `BoundariesError` unless the offsets start at 0, never decrease and end at `rows` (`padded`: not beyond)."""
    if not offsets or offsets[0] != 0:
        raise BoundariesError(f"{name} starts at {offsets[0] if offsets else 'nothing'}: the first offset must be 0.")
    for index, (before, after) in enumerate(pairwise(offsets)):
        if after < before:
            raise BoundariesError(
                f"{name} decreases from {before} to {after} at position {index + 1}: offsets are cumulative. Pad a fixed "
                "capacity by repeating the last offset, not with zeros."
            )
    if offsets[-1] > rows or (offsets[-1] < rows and not padded):
        raise BoundariesError(
            f"{name} ends at {offsets[-1]}, but there are {rows} rows: the last offset must be the number of rows."
        )


def check_bounds(longest: int, calls: Sequence[AttentionCall], env: Env, *, name: str = "cu_seqlens") -> None:
    """Raise `BoundError` when an attention call's `max_seqlen` is below the longest segment."""
    for call in calls:
        for bound in call.bounds:
            if bound.real(env) < longest:
                raise BoundError(
                    f"max_seqlen is {bound.real(env)}, but the longest segment of {name} has {longest} rows: "
                    f"pass at least {longest}."
                )


def device_of(args: Sequence[Any]) -> torch.device:
    """The device that a call runs on: the first accelerator among its tensors, else the CPU."""
    devices = [a.device for a in args if isinstance(a, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
