"""`vit-compile plan`: its options, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    traffic: Annotated[
        str | None,
        typer.Option("--traffic", help="Preset: chat, catalogue, documents, fixed, video or adversarial.", show_default=False),
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Requests of your own, as JSONL.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model folder or hub name; only its config.json is read.", show_default=False)
    ] = None,
    patch_size: Annotated[
        int | None, typer.Option("--patch-size", help="Pixels; instead of --model. [16, merge 2]", show_default=False)
    ] = None,
    merge_size: Annotated[
        int | None, typer.Option("--merge-size", help="Side in patches of what becomes a token.", show_default=False)
    ] = None,
    temporal_patch_size: Annotated[
        int | None, typer.Option("--temporal-patch-size", help="Frames of a clip that share patches.", show_default=False)
    ] = None,
    extra_tokens: Annotated[int, typer.Option("--extra-tokens", help="Class and register tokens of an image.")] = 0,
    max_image_tokens: Annotated[
        int, typer.Option("--max-image-tokens", help="The processor's limit for an image or a frame group.")
    ] = 16384,
    max_graphs: Annotated[int, typer.Option("--max-graphs", min=1, help="Most budgets of the ladder.")] = 12,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Largest budget, in output tokens.")] = 4096,
    max_items: Annotated[int, typer.Option("--max-items", min=1, help="Most images and clips of a replay.")] = 16,
    measured: Annotated[
        Path | None,
        typer.Option("--measured", help="JSON of manager.snapshot(): times, bytes, start-up.", show_default=False),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Most bytes of all graphs; with --measured.", show_default=False)
    ] = None,
    count: Annotated[int | None, typer.Option("--count", help="Requests to draw. [2000]", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which requests. [0]", show_default=False)] = None,
    save_trace: Annotated[
        Path | None, typer.Option("--save-trace", help="JSONL file for the requests that were drawn.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Fit a ladder of token budgets to traffic: padded share, bytes, start-up, and which graphs are worth their memory."""
    from vit_compile.tools.plan import make_plan
    from vit_compile.tools.plan_model import tower_of
    from vit_compile.tools.plan_result import PlanOptions

    options = PlanOptions(
        traffic=traffic,
        trace=trace,
        count=count,
        seed=seed,
        max_graphs=max_graphs,
        max_tokens=max_tokens,
        max_items=max_items,
        measured=measured,
        max_bytes=max_bytes,
        save_trace=save_trace,
    )
    if model is not None:
        from vit_compile.tools.dependencies import require

        require("transformers", extra="hf")
    tower = tower_of(
        model,
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=temporal_patch_size,
        extra_tokens=extra_tokens,
        max_image_tokens=max_image_tokens,
    )
    result = make_plan(options, tower)
    if json:
        print(result.as_json())
    else:
        from vit_compile.tools.plan_report import print_plan

        print_plan(result)
