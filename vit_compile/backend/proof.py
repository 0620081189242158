"""Is padding safe? Tried out, never assumed.

Two proofs, both on real inputs. *Count*: the same call, exact and padded to at least twice its rows, must agree within
the precision of its dtype (finds results that depend on how many rows there are: a division by the row count). *Garbage*:
a capture is replayed with different garbage in the padding, and the real rows must be bitwise equal (finds results that
read padding: a mean, a softmax over rows). Reads the device, so it belongs to capture time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vit_compile.backend.padding import StaticInputs, cut, padded_env
from vit_compile.backend.program import Program, Step
from vit_compile.backend.roles import RoleTable
from vit_compile.backend.sizes import Env
from vit_compile.stats import Skip

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_UNITS = (64, 36, 16, 9, 8, 4, 3, 2, 1)


def trim(value: Any, sizes: Sequence[int]) -> Any:
    """The front part of a tensor with the given sizes: its real rows. No copy."""
    for dim, size in enumerate(sizes):
        if value.shape[dim] != size:
            value = value.narrow(dim, 0, size)
    return value


def real_outputs(program: Program, values: Sequence[Any], env: Env) -> list[torch.Tensor]:
    """The real rows of a padded run's tensor outputs."""
    return [
        trim(value, program.specs[output.slot].sizes(env))
        for output, value in zip(program.outputs, values, strict=True)
        if output.slot >= 0 and isinstance(value, torch.Tensor)
    ]


def smaller_call(args: Sequence[Any], program: Program, roles: RoleTable, env: Env, below: int) -> tuple[list[Any], Env] | None:
    """A call with about half of `below` rows, cut from a real one; None when the traced guards allow none."""
    real = roles.rows(env)
    assert real is not None, "only graphs with a row dimension are padded"
    top = min(real, max(1, below // 2)) if real >= below or real > below // 2 else real
    for unit in _UNITS:
        rows = top // unit * unit
        if 0 < rows < below:
            made = cut(args, program, roles, env, rows)
            if not isinstance(made, Skip) and program.table.broken_guard(made[1]) is None:
                return made
    return None


def prove_count(program: Program, roles: RoleTable, args: Sequence[Any], env: Env) -> Skip | None:
    """Compare an exact run with one padded to twice its rows or more; None when they agree."""
    real = roles.rows(env)
    assert real is not None, "only graphs with a row dimension are padded"
    wide = _wider(program, roles, env, real)
    if wide is None:
        return Skip("padding-unproved", f"no size above {real} rows satisfies the traced guards")
    inputs = StaticInputs(program, roles, wide)
    inputs.fill(args)
    exact = real_outputs(program, program.run(args, env), env)
    padded = real_outputs(program, program.run(inputs.substitute(args), wide, covering_bounds=True), env)
    for index, (want, got) in enumerate(zip(exact, padded, strict=True)):
        difference = _relative_difference(got, want)
        limit = _TOLERANCE.get(want.dtype, 0.0)
        if not difference <= limit:
            return Skip(
                "padding-unsafe",
                f"output {index} changes by {difference:.2g} (relative) when {real} rows are padded to {roles.rows(wide)}",
            )
    return None


def _wider(program: Program, roles: RoleTable, env: Env, real: int) -> Env | None:
    for unit in _UNITS:
        rows = -(-2 * real // unit) * unit
        wide = padded_env(program, roles, env, rows, pad_segments=True)
        if not isinstance(wide, Skip) and program.table.broken_guard(_with_bounds(wide, env, roles)) is None:
            return wide
    return None


def _with_bounds(target: Env, env: Env, roles: RoleTable) -> Env:
    """An environment with the real bounds put back: guards may speak of them."""
    return tuple(env[i] if i in roles.bound_symbols else value for i, value in enumerate(target))


def guards_at(program: Program, roles: RoleTable, target: Env, env: Env) -> str | None:
    """The traced guard that a capture size breaks, or None."""
    return program.table.broken_guard(_with_bounds(target, env, roles))


def _relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return 0.0 if torch.equal(got, want) else float("inf")
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    a, b = got.to(wide), want.to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    norm = torch.linalg.vector_norm(b).item()
    return torch.linalg.vector_norm(a - b).item() / norm if norm else float((a != b).any().item())


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
    program: Program,
    roles: RoleTable,
    inputs: StaticInputs,
    args: Sequence[Any],
    env: Env,
    replay: Callable[[list[Any], Env], list[Any]],
    *,
    nan: bool,
) -> Skip | None:
    """Replay a capture with different garbage in its padding; None when the real rows are bitwise equal.

    Args:
        inputs: the capture's static inputs; left clean.
        args, env: a call with fewer rows than the capture.
        replay: runs the capture on the buffers as they are; takes the substituted arguments and the real sizes.
        nan: also try NaN, where every attention op keeps it inside its segment.
    """
    generator = torch.Generator().manual_seed(0)
    inputs.fill(args)
    substituted = inputs.substitute(args)
    reference = [t.clone() for t in real_outputs(program, replay(substituted, env), env)]
    for kind in ("small", "large", *(("nan",) if nan else ())):
        inputs.poison(kind, generator)
        got = real_outputs(program, replay(substituted, env), env)
        same = all(bits_equal(a, b) for a, b in zip(got, reference, strict=True))
        inputs.clean()
        if not same:
            where = _first_difference(program, inputs, args, env, kind)
            return Skip("padding-unsafe", f"{kind} garbage in the padding changed real rows; first seen after {where}")
    return None


def _first_difference(program: Program, inputs: StaticInputs, args: Sequence[Any], env: Env, kind: str) -> str:
    """The first step of a straight padded run whose real rows depend on the padding."""
    seen: list[dict[str, list[torch.Tensor]]] = []
    inputs.fill(args)
    for poisoned in (False, True):
        results: dict[str, list[torch.Tensor]] = {}

        def watch(step: Step, slots: list[Any], results: dict[str, list[torch.Tensor]] = results) -> None:
            results[step.name] = [trim(slots[slot], program.specs[slot].sizes(env)).clone() for slot in step.outputs]

        if poisoned:
            inputs.poison(kind, torch.Generator().manual_seed(0))
        program.run(inputs.substitute(args), inputs.env, covering_bounds=True, watch=watch)
        seen.append(results)
    inputs.clean()
    for name in seen[0]:
        if not all(bits_equal(a, b) for a, b in zip(seen[0][name], seen[1][name], strict=True)):
            return name
    return "the attention of the captured chain"
