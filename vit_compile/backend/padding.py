"""The one place that allocates static inputs, fills them and pads them, by role.

Padding by role: rows are zero; an index continues as identity; boundaries repeat their last offset (empty segments);
per-segment rows are one (several columns) or zero (a length). After a larger call, only the tail that it left dirty is
reset. Nothing here reads the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vit_compile.backend.program import Program
from vit_compile.backend.roles import InputRole, Role, RoleTable
from vit_compile.backend.sizes import Env
from vit_compile.stats import Skip

MIN_SEGMENTS = 4


def segment_capacity(segments: int) -> int:
    """Boundary capacity for a number of segments: the next power of two, at least `MIN_SEGMENTS`.

    A loose capacity costs time in the attention kernel, and one capacity per count would need a graph each.
    """
    return max(MIN_SEGMENTS, 1 << max(0, segments - 1).bit_length())


def padded_env(
    program: Program,
    roles: RoleTable,
    env: Env,
    rows: int,
    *,
    pad_segments: bool,
    min_segments: int = 0,
    tight_bounds: bool = False,
) -> Env | Skip:
    """The environment of a capture for `rows` rows that can serve a call with environment `env`.

    Args:
        env: sizes of the call.
        rows: rows of the capture; at least those of the call, but for `cut`.
        pad_segments: leave room for more segments than the call has.
        min_segments: and at least for so many.
        tight_bounds: a bound that is short beside the call's rows stays short (a power of two). Else it covers the capture.
    """
    target = list(env)
    if roles.row_symbol >= 0:
        real = env[roles.row_symbol]
        target[roles.row_symbol] = rows
        for symbol, (numerator, denominator) in roles.scaled.items():
            if env[symbol] * denominator != real * numerator:
                return Skip("row-scale-changed", f"{program.table.names[symbol]} = {env[symbol]} with {real} rows")
            if rows * numerator % denominator:
                return Skip("guard-forbids-size", f"{rows} rows are not a multiple of {denominator}")
            target[symbol] = rows * numerator // denominator
    _pad_bounds(roles, env, target, tight=tight_bounds)
    if pad_segments:
        for symbol, (base, difference) in roles.segment_symbols.items():
            if env[symbol] != env[base] + difference:
                return Skip("row-scale-changed", f"{program.table.names[symbol]} = {env[symbol]} for {env[base] - 1} segments")
            least = max(env[base] - 1, min_segments, _least_segments(roles, base, tuple(target)))
            # A per-segment input gets one neutral row more than there are segments: rows past the last boundary belong to
            # "the segment after the last" for models that look segments up by row.
            target[symbol] = segment_capacity(least) + 1
    return tuple(target)


def _pad_bounds(roles: RoleTable, env: Env, target: list[int], *, tight: bool) -> None:
    """Symbolic bounds of a capture: the whole capture where the call's bound is as long as the call, else a power of two.

    A window's bound stays tight that way, and one capture serves images of any length.
    """
    for calls in roles.boundary_calls.values():
        for call in calls:
            for bound in call.bounds:
                for symbol in bound.size.symbols & roles.bound_symbols if bound.size is not None else ():
                    given = env[symbol]
                    whole = not tight or 2 * given > call.query_rows(env)
                    target[symbol] = call.query_rows(tuple(target)) if whole else 1 << (given - 1).bit_length()


def _least_segments(roles: RoleTable, base: int, target: Env) -> int:
    """Segments for which a capture must have room whatever the call: windows of a bounded length that fill its rows.

    Images are not multiples of the window, so half as many again are allowed for. 1 where segments may be as long as
    the whole capture.
    """
    least = 1
    for role in roles.inputs:
        if role.role is Role.BOUNDARIES and base in role.spec.shape[0].symbols:
            for call in roles.boundary_calls[role.arg]:
                rows = call.query_rows(target)
                literals = [bound.literal for bound in call.bounds if bound.literal is not None and 0 < bound.literal < rows]
                least = max([least, *(-(-3 * rows // (2 * literal)) for literal in literals)])
    return least


class PaddedBuffer:
    """A static input that is filled at the front and padded behind, by role.

    Entries of dimension `dim` from `dirty` on hold padding; before it, data of some call. A `dirty` below 0 means that
    nothing is known: the next fill resets everything behind its data. `dim` is -1 for an input that is never padded.
    """

    __slots__ = ("dim", "dirty", "identity", "name", "pad", "role", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor, role: Role, dim: int, pad: int = 0) -> None:
        self.name, self.tensor, self.role, self.dim, self.pad = name, tensor, role, dim, pad
        self.identity: torch.Tensor | None = None
        self.dirty = -1
        if role is Role.INDEX:
            self.identity = torch.arange(tensor.shape[dim], dtype=tensor.dtype, device=tensor.device)

    @property
    def entries(self) -> int:
        """Entries that the buffer has room for."""
        return int(self.tensor.shape[self.dim])

    def fill(self, value: torch.Tensor) -> None:
        """Copy a call's data to the front and pad behind it."""
        if self.dim < 0:
            self.tensor.copy_(value)
            return
        real = value.shape[self.dim]
        self.tensor.narrow(self.dim, 0, real).copy_(value)
        self.pad_from(real)

    def pad_from(self, real: int) -> None:
        """Entries before `real` were just written: make those behind it padding again, as far as they are not."""
        if self.dim < 0:
            return
        if self.role is Role.BOUNDARIES:
            # What is repeated differs from call to call, so the whole tail is always written.
            if 0 < real < self.entries:
                tail = self.tensor[real:]
                tail.copy_(self.tensor[real - 1 : real].expand(tail.shape))
            self.dirty = real
            return
        end = self.entries if self.dirty < 0 else self.dirty
        if end > real:
            tail = self.tensor.narrow(self.dim, real, end - real)
            if self.identity is not None:
                tail.copy_(self.identity[real:end])
            else:
                tail.fill_(self.pad)
        self.dirty = real

    def poison(self, kind: str, generator: torch.Generator) -> None:
        """Put garbage into the padding of row data: "small", "large" (finite) or "nan".

        Integers get values that occur among the real ones, so that they stay legal indices. Boundaries, indices and
        per-segment rows keep their neutral padding, which is part of their meaning.
        """
        if self.role is Role.ROWS and 0 < self.dirty < self.entries:
            tail = self.tensor.narrow(self.dim, self.dirty, self.entries - self.dirty)
            tail.copy_(_garbage(tail, self, kind, generator))

    def clean(self) -> None:
        """Restore all padding after `poison`."""
        real, self.dirty = self.dirty, -1
        if self.role is not Role.BOUNDARIES and real >= 0:
            self.pad_from(real)
        self.dirty = max(real, 0)


class StaticInputs:
    """Buffers for the real inputs of a graph at one capture size; owned by the capture."""

    def __init__(self, program: Program, roles: RoleTable, env: Env) -> None:
        self.program, self.roles, self.env = program, roles, env
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [self._allocate(role) for role in roles.inputs]

    def _allocate(self, role: InputRole) -> PaddedBuffer:
        shape = role.spec.sizes(self.env)
        strides = tuple(stride(self.env) for stride in role.spec.stride)
        tensor = torch.empty_strided(shape, strides, dtype=role.spec.dtype, device=role.spec.device).fill_(neutral(role))
        buffer = PaddedBuffer(role.name, tensor, role.role, role.dim, neutral(role))
        if buffer.identity is not None:
            tensor.copy_(buffer.identity)
        buffer.dirty = 0
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(
            b.tensor.untyped_storage().nbytes() + (b.identity.nbytes if b.identity is not None else 0) for b in self.buffers
        )

    def substitute(self, args: Sequence[Any]) -> list[Any]:
        """The graph's arguments with the real inputs replaced by the buffers."""
        substituted = list(args)
        for role, buffer in zip(self.roles.inputs, self.buffers, strict=True):
            substituted[role.arg] = buffer.tensor
        return substituted

    def fill(self, args: Sequence[Any]) -> None:
        """Copy a call's inputs to the front of the buffers and restore the padding behind them."""
        for role, buffer in zip(self.roles.inputs, self.buffers, strict=True):
            value = args[role.arg]
            if role.indexes is not None:  # -1 is the last real row, not the last of the capture
                value = torch.where(value < 0, value + role.indexes(self.program.table.read(args)), value)
            buffer.fill(value)

    def poison(self, kind: str, generator: torch.Generator) -> None:
        """Put garbage into the padding of the last `fill`; see `PaddedBuffer.poison`."""
        for buffer in self.buffers:
            buffer.poison(kind, generator)

    def clean(self) -> None:
        """Restore all padding after `poison`."""
        for buffer in self.buffers:
            buffer.clean()


def trim(value: Any, sizes: Sequence[int]) -> Any:
    """The front part of a tensor with the given sizes: its real rows. No copy."""
    for dim, size in enumerate(sizes):
        if value.shape[dim] != size:
            value = value.narrow(dim, 0, size)
    return value


def neutral(role: InputRole) -> int:
    """The value that pads an input."""
    many_columns = role.role is Role.PER_SEGMENT and len(role.spec.shape) > 1
    return 1 if many_columns and not role.spec.dtype.is_floating_point else 0


def overlaps(program: Program, roles: RoleTable, env: Env) -> InputRole | None:
    """An input whose strides make elements share memory (an expanded tensor); no buffer can stand in for it."""
    for role in roles.inputs:
        shape, strides = role.spec.sizes(env), [stride(env) for stride in role.spec.stride]
        if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
            return role
    return None


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """The generator, or one on the device that it seeds: millions of values are slow to make elsewhere and to copy."""
    if generator.device == device:
        return generator
    seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))


def _garbage(tail: torch.Tensor, buffer: PaddedBuffer, kind: str, generator: torch.Generator) -> torch.Tensor:
    generator = generator_on(tail.device, generator)
    if tail.dtype == torch.bool:
        return torch.randint(0, 2, tail.shape, generator=generator, device=tail.device, dtype=torch.bool)
    if not tail.dtype.is_floating_point and not tail.dtype.is_complex:
        real = buffer.tensor.narrow(buffer.dim, 0, buffer.dirty)
        picks = torch.randint(0, buffer.dirty, (tail.shape[buffer.dim],), generator=generator, device=tail.device)
        return real.index_select(buffer.dim, picks)
    if kind == "nan":
        return torch.full_like(tail, math.nan)
    scale = 1.0 if kind == "small" else 1e4
    noise = torch.randn(tail.shape, generator=generator, device=tail.device, dtype=torch.float32)
    return noise.mul_(scale).clamp_(-6e4, 6e4).to(tail.dtype)


def randomised(args: Sequence[Any], roles: RoleTable) -> list[Any]:
    """The same call with random numbers in its floating-point rows: real ones may be constant, and hide what depends on them."""
    result, generator = list(args), torch.Generator().manual_seed(0)
    for role in roles.inputs:
        value = args[role.arg]
        if role.role is Role.ROWS and value.dtype.is_floating_point:
            own = generator_on(value.device, generator)
            noise = torch.randn(value.shape, generator=own, device=value.device, dtype=torch.float32)
            result[role.arg] = torch.empty_like(value).copy_(noise)
    return result


def cut(args: Sequence[Any], program: Program, roles: RoleTable, env: Env, rows: int) -> tuple[list[Any], Env] | Skip:
    """A smaller call made from a real one: its first `rows` rows, for trying out padding.

    Boundaries are clipped (segments only get shorter), an index becomes identity, per-segment rows stay.
    """
    smaller = padded_env(program, roles, env, rows, pad_segments=False)
    if isinstance(smaller, Skip):
        return smaller
    # Bounds are data, not sizes: they stay.
    smaller = tuple(env[i] if i in roles.bound_symbols else value for i, value in enumerate(smaller))
    result = list(args)
    for role in roles.inputs:
        value = args[role.arg]
        if role.role is Role.BOUNDARIES:
            result[role.arg] = value.clamp(max=roles.boundary_rows(role.arg, smaller))
        elif role.role is Role.INDEX:
            result[role.arg] = torch.arange(role.spec.shape[role.dim](smaller), dtype=value.dtype, device=value.device)
        elif role.role is Role.ROWS:
            result[role.arg] = value.narrow(role.dim, 0, role.spec.shape[role.dim](smaller)).clone()
    return result, smaller
