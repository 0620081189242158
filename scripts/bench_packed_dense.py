"""A trained DINOv2 ViT-S/14 on photographs at their native sizes: one by one, and packed into a handful of graphs.

    python scripts/bench_packed_dense.py --weights dinov2-s.safetensors --photos photos/ --out docs/benchmarks/packed-dense.json

Every photograph and its flips and crops are encoded; peers take them one at a time, but for the packed form, which takes all in
one call. Reported: time for all photographs, graphs, memory, differences from eager, and whether each photograph's nearest
neighbours among the flips and crops are those of eager.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import vit_compile
from scripts.bench_models import environment, median_ms
from vit_compile.tools.gallery import gallery_entries
from vit_compile.tools.images import Normalization, PatchGrid, load_image, normalize, resize

PATCH = 14
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "ImageNet")
BUDGETS = (512, 1024, 2048, 4096, 8192)

Encode = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def model_of(weights: Path | None, device: torch.device) -> Any:
    """DINOv2 ViT-S/14 in eval mode; random weights without a file."""
    from transformers import Dinov2Config, Dinov2Model

    model = Dinov2Model(Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=PATCH))
    if weights is not None:
        from safetensors.torch import load_file

        model.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return model.eval().to(device)


def grid_of(width: int, height: int, most: int) -> PatchGrid:
    """The native ratio, at most so many patches."""
    scale = min(1.0, (most * PATCH * PATCH / (width * height)) ** 0.5)
    return PatchGrid(max(1, int(height * scale) // PATCH), max(1, int(width * scale) // PATCH), PATCH)


def pixels(image: Any, most: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[3, H, W]."""
    return normalize(resize(image, grid_of(image.width, image.height, most)), IMAGENET)[0].to(device, dtype)


def one_by_one(call: Any) -> Encode:
    """Last hidden states of images, each in a call of its own."""

    def encode(images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [call(image[None]).last_hidden_state for image in images]

    return encode


def marked(compiled: Any) -> Any:
    """Height and width as symbols from the first call on."""

    def call(pixel_values: torch.Tensor) -> Any:
        torch._dynamo.mark_dynamic(pixel_values, 2)
        torch._dynamo.mark_dynamic(pixel_values, 3)
        return compiled(pixel_values)

    return call


def neighbours(photos: list[torch.Tensor], gallery: list[torch.Tensor]) -> torch.Tensor:
    """For each photo the three nearest entries by the class tokens' cosine."""
    a = torch.nn.functional.normalize(torch.stack([x[0, 0].double() for x in photos]), dim=1)
    b = torch.nn.functional.normalize(torch.stack([x[0, 0].double() for x in gallery]), dim=1)
    return (a @ b.T).topk(3, dim=1).indices.cpu()


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Largest over the images of the worst token's relative difference."""
    return max(
        float(((a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1)).max()) for a, b in zip(got, want, strict=True)
    )


@torch.inference_mode()
def peer(
    name: str,
    make: Callable[[], tuple[Encode, Callable[[], dict[str, Any]]]],
    images: Any,
    reference: Any,
    device: torch.device,
    runs: int,
) -> dict[str, Any]:
    """One peer: set-up, time for all photographs, difference, neighbours."""
    photos, gallery = images
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    started = time.perf_counter()
    encode, facts = make()
    got = [x.clone() for x in encode(photos)]
    setup = time.perf_counter() - started
    row: dict[str, Any] = {"peer": name, "setup_s": setup, "difference": difference(got, reference[0])}
    row["ms"] = median_ms(lambda: encode(photos), device, runs)
    row["reserved_bytes"] = torch.cuda.memory_reserved() - before if device.type == "cuda" else 0
    row["neighbours_as_eager"] = bool(torch.equal(neighbours(got, encode(gallery)), reference[1]))
    row |= facts()
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--most-patches", type=int, default=1369)
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cudnn.allow_tf32 = False
    files = sorted(path for path in arguments.photos.iterdir() if path.suffix in (".jpg", ".png"))
    opened = [(path.stem, load_image(path)) for path in files]
    result: dict[str, Any] = {
        "kind": "dense",
        "command": "python " + " ".join(sys.argv),
        "environment": environment(),
        "photos": len(files),
        "rows": [],
    }
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(arguments.weights, device).to(dtype)
        photos = [pixels(image, arguments.most_patches, device, dtype) for _, image in opened]
        entries = [entry.image for name, image in opened for entry in gallery_entries(name, image)]
        gallery = [pixels(image, arguments.most_patches, device, dtype) for image in entries]
        result["sizes"] = len({tuple(image.shape) for image in photos})
        result["patches"] = sum(image.shape[1] * image.shape[2] // PATCH**2 for image in photos)
        with torch.inference_mode():
            eager = one_by_one(model)
            reference = [x.clone() for x in eager(photos)], neighbours(eager(photos), eager(gallery))

        def eager_peer(model: Any = model) -> Any:
            return one_by_one(model), dict

        def compiled_peer(model: Any = model) -> Any:
            torch.compiler.reset()
            return one_by_one(marked(torch.compile(model, dynamic=None))), dict

        def graph_per_size(model: Any = model) -> Any:
            torch.compiler.reset()
            options = {"compiler": arguments.compiler, "max_graphs": 128}
            return one_by_one(marked(torch.compile(model, backend="vit_cudagraph", options=options))), dict

        def packed(model: Any = model, most: int = len(photos)) -> Any:
            torch.compiler.reset()
            handle = vit_compile.accelerate(
                model, token_budgets=tuple(arguments.budgets), max_items_per_batch=most, compiler=arguments.compiler
            )
            handle.capture()

            def facts() -> dict[str, Any]:
                stats = handle.stats()
                handle.close()
                keys = ("graph_bytes", "graph_hits", "miss_reasons", "own_calls", "padded_share", "capture_seconds")
                return {"graphs": len(stats["graphs"]), **{key: stats[key] for key in keys}}

            return lambda images: [output.last_hidden_state for output in handle.encode(images)], facts

        peers = {"eager": eager_peer, "torch.compile": compiled_peer, "a graph per size": graph_per_size, "packed": packed}
        for name, make in peers.items():
            try:
                row = peer(name, make, (photos, gallery), reference, device, arguments.runs)
            except Exception as error:
                row = {"peer": name, "error": f"{type(error).__name__}: {error}"[:400]}
                print(json.dumps(row), flush=True)
            result["rows"].append({"dtype": str(dtype).removeprefix("torch."), **row})
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
