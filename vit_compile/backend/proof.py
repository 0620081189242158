"""Is padding safe? Tried out, never assumed.

Two proofs, both on real inputs. *Count*: the same call, exact and padded to at least twice its rows, must agree within
the precision of its dtype (finds results that depend on how many rows there are: a division by the row count). *Garbage*:
a capture is replayed with different garbage in the padding, and the real rows must be bitwise equal (finds results that
read padding: a mean, a softmax over rows). Reads the device, so it belongs to capture time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vit_compile.backend.capture import Capture
from vit_compile.backend.padding import cut, padded_env, randomised, trim
from vit_compile.backend.program import Program, Step
from vit_compile.backend.roles import RoleTable
from vit_compile.backend.sizes import Env
from vit_compile.stats import Skip

# Relative difference of a whole output (by norm), and of one element beside the size of its channel. Other matrix shapes
# sum in another order; a model in bfloat16 with random weights was seen to differ by 0.03 as a whole.
_TOLERANCE = {
    torch.float64: (1e-6, 1e-5),
    torch.float32: (1e-3, 1e-2),
    torch.bfloat16: (0.1, 0.75),
    torch.float16: (0.05, 0.4),
}
_UNITS = (64, 36, 16, 9, 8, 4, 3, 2, 1)


def real_outputs(program: Program, values: Sequence[Any], env: Env) -> list[torch.Tensor]:
    """The real rows of a padded run's tensor outputs."""
    return [
        trim(value, program.specs[output.slot].sizes(env))
        for output, value in zip(program.outputs, values, strict=True)
        if output.slot >= 0 and isinstance(value, torch.Tensor)
    ]


def smaller_call(args: Sequence[Any], program: Program, roles: RoleTable, env: Env, below: int) -> tuple[list[Any], Env] | None:
    """A call with fewer than `below` rows, about half if possible, cut from a real one.

    None means that no legal size lies below, so that nothing will ever be padded to `below`.
    """
    real = roles.rows(env)
    assert real is not None, "only graphs with a row dimension are padded"
    half = min(real, max(1, below // 2))
    round_sizes = [half // unit * unit for unit in _UNITS]
    for rows in dict.fromkeys([*round_sizes, *range(half, 0, -1), *range(half + 1, min(real, below - 1) + 1)]):
        if 0 < rows < below:
            made = cut(args, program, roles, env, rows)
            if not isinstance(made, Skip) and program.table.broken_guard(made[1]) is None:
                return made
    return None


def prove_count(program: Program, roles: RoleTable, args: Sequence[Any], env: Env, kind: type[Capture]) -> Skip | None:
    """Compare an exact run with one padded to twice its rows and segments or more; None when they agree.

    Args:
        kind: how captures of this graph run; used without recording.
    """
    real = roles.rows(env)
    assert real is not None, "only graphs with a row dimension are padded"
    wide = _wider(program, roles, env, real)
    if wide is None:
        return Skip("padding-unproved", f"no size above {real} rows satisfies the traced guards")
    padded = kind(program, roles, wide, None, {})
    for call in (list(args), randomised(args, roles)):
        exact = real_outputs(program, program.run(call, env), env)
        got = real_outputs(program, padded.replay_unrecorded(call, env), env)
        for index, (want, have) in enumerate(zip(exact, got, strict=True)):
            difference = difference_over_tolerance(have, want)
            if not difference <= 1:
                where = _first_step(program, call, env, padded)
                detail = f"output {index} changes ({difference:.2g} of what is tolerated) when {real} rows are padded to"
                return Skip("padding-unsafe", f"{detail} {roles.rows(wide)}; first seen after {where}")
    return None


def _first_step(program: Program, args: Sequence[Any], env: Env, padded: Capture) -> str:
    """The first step whose real rows differ between an exact and a padded run."""
    exact, wide = _Watched(program, env), _Watched(program, env)
    program.run(args, env, watch=exact)
    padded.replay_unrecorded(args, env, wide)
    for name, values in exact.seen.items():
        for want, have in zip(values, wide.seen.get(name, values), strict=True):
            if not difference_over_tolerance(have, want) <= 1:
                return name
    return "the last step"


class _Watched:
    """Collects the real rows of every step's results."""

    def __init__(self, program: Program, env: Env) -> None:
        self.program, self.env = program, env
        self.seen: dict[str, list[torch.Tensor]] = {}

    def __call__(self, step: Step, slots: list[Any]) -> None:
        sizes = [self.program.specs[slot].sizes(self.env) for slot in step.outputs]
        self.seen[step.name] = [trim(slots[s], size).clone() for s, size in zip(step.outputs, sizes, strict=True)]


def _wider(program: Program, roles: RoleTable, env: Env, real: int) -> Env | None:
    segments = max((env[base] - 1 for base, _ in roles.segment_symbols.values()), default=0)
    sizes = [-(-2 * real // unit) * unit for unit in _UNITS]
    for rows in dict.fromkeys([*sizes, *range(2 * real, 2 * real + 128)]):
        wide = padded_env(program, roles, env, rows, pad_segments=True, min_segments=2 * segments)
        if not isinstance(wide, Skip) and guards_at(program, roles, wide, env) is None:
            return wide
    return None


def guards_at(program: Program, roles: RoleTable, target: Env, env: Env) -> str | None:
    """The traced guard that a capture size breaks, or None. Bounds are taken from the call: they are not sizes."""
    return program.table.broken_guard(tuple(env[i] if i in roles.bound_symbols else v for i, v in enumerate(target)))


def difference_over_tolerance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over what is tolerated: of the whole by norm, of each element beside its channel's size."""
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return 0.0 if torch.equal(got, want) else float("inf")
    whole, single = _TOLERANCE.get(want.dtype, (0.0, 0.0))
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    a, b = got.to(wide), want.to(wide)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return float("inf")
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    norm, difference = torch.linalg.vector_norm(b).item(), (a - b).abs()
    if norm == 0 or whole == 0:
        return 0.0 if not bool(difference.any()) else float("inf")
    channels = b.abs().square().reshape(-1, b.shape[-1] if b.dim() else 1).mean(0).sqrt()
    floor = channels.median() * 0.1 if bool(channels.median() > 0) else channels.max() * 0.01
    beside = (difference.reshape(-1, channels.shape[0]) / torch.maximum(channels, floor)).max().item()
    return float(max(torch.linalg.vector_norm(difference).item() / norm / whole, beside / single))


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality (NaN equals itself, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        if a.numel()
        else True
    )


def prove_garbage(
    program: Program, roles: RoleTable, capture: Capture, args: Sequence[Any], env: Env, *, nan: bool
) -> Skip | None:
    """Replay a capture with different garbage in its padding; None when the real rows are bitwise equal.

    Args:
        capture: a recorded capture; its inputs are left clean.
        args, env: a call with fewer rows than the capture.
        nan: also try NaN, where every attention op keeps it inside its segment.
    """
    args, inputs = randomised(args, roles), capture.inputs
    generator = torch.Generator().manual_seed(0)
    inputs.fill(args)
    substituted = inputs.substitute(args)
    reference = [t.clone() for t in real_outputs(program, capture.replay_filled(substituted, env), env)]
    for kind in ("small", "large", *(("nan",) if nan else ())):
        inputs.poison(kind, generator)
        got = real_outputs(program, capture.replay_filled(substituted, env), env)
        same = all(bits_equal(a, b) for a, b in zip(got, reference, strict=True))
        inputs.clean()
        if not same:
            where = _first_reader(program, roles, capture, args, env, kind)
            return Skip("padding-unsafe", f"{kind} garbage in the padding changed real rows; first seen after {where}")
    return None


def _first_reader(program: Program, roles: RoleTable, capture: Capture, args: Sequence[Any], env: Env, kind: str) -> str:
    """The first step of an unrecorded padded run whose real rows depend on the padding."""
    twin = type(capture)(program, roles, capture.env, None, {})
    clean, poisoned = _Watched(program, env), _Watched(program, env)
    twin.replay_unrecorded(args, env, clean)
    twin.inputs.poison(kind, torch.Generator().manual_seed(0))
    twin.replay_filled(twin.inputs.substitute(args), env, poisoned)
    for name, values in clean.seen.items():
        if not all(bits_equal(a, b) for a, b in zip(values, poisoned.seen[name], strict=True)):
            return name
    return "the last step"
