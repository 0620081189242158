"""The flat list of steps: what a straight run keeps alive, and what it hands on."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.backend.common import compiled, packed, wide_rows
from tests.towers import norm_view_tower
from vit_compile.backend.program import Program, Step


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_nothing_is_kept_after_its_last_use(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any help of the garbage collector, a step's results are gone once no later step reads them.

    Deep towers would otherwise need memory for every layer at once, in each capture.
    """
    model = norm_view_tower(depth=5)
    run = Program.run
    seen: dict[int, Any] = {}
    leaks: list[tuple[str, int]] = []

    def watched(self: Program, args: Any, env: Any, **more: Any) -> Any:
        def watch(step: Step, slots: list[Any]) -> None:
            for slot, ref in list(seen.items()):
                if slots[slot] is None and ref() is not None:
                    leaks.append((step.name, slot))
            seen.update({slot: weakref.ref(slots[slot]) for slot in step.outputs})

        return run(self, args, env, **{**more, "watch": watch})

    ours = compiled(model, mode="none", compiler=compiler)
    args = packed([6, 5], make=wide_rows, bound=32)
    with torch.no_grad():
        ours(*args)  # compiles
        monkeypatch.setattr(Program, "run", watched)
        gc.disable()
        try:
            ours(*args)
        finally:
            gc.enable()
    assert len(seen) > 5 * 4
    assert not leaks
