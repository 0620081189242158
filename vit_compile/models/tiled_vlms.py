"""InternVL, Gemma 3, Llama 4, LLaVA, Idefics3, SmolVLM: images and tiles of one size.

Their towers are dense: attention is left alone, and a tile depends on no other. The graphs run the model's own methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, check_reentry, find_module, find_owner, original
from vit_compile.models.tile_calls import PIXELS, TileCall, bare_tower, noise_tile
from vit_compile.models.tiles import TileInputs

FRAMES = {
    "image": TileInputs(path="main", counts="image_num_patches"),
    "video": TileInputs(path="main", inputs={PIXELS: "pixel_values_videos"}, counts="video_num_patches"),
}
"""InternVL's: a frame of a clip is a tile, and both go through the same graphs."""


def _pooled(output: Any) -> torch.Tensor:
    features: torch.Tensor = output.pooler_output
    return features


def _hidden(output: Any) -> torch.Tensor:
    features: torch.Tensor = output.last_hidden_state
    return features


def bind_internvl(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """`get_image_features` with pixel shuffle and projector; `forward` of a bare tower.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields, options: see `TileCall.bind`.
    """
    tower = find_module(model, *towers)
    if tower is model:
        return bare_tower(tower).bind(fields=fields, **options)
    owner: Any = find_owner(model, "multi_modal_projector")
    run = original(owner, "get_image_features")
    return TileCall(
        owner=owner,
        method="get_image_features",
        tower=tower,
        run=lambda tiles: run(tiles, return_dict=True),
        features=_pooled,
        projector=[owner.multi_modal_projector],
        inputs=FRAMES,
    ).bind(fields=fields, **options)


def bind_internvl_chat(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """`extract_feature` of the published code: tower, pixel shuffle, `mlp1`. Arguments: see `bind_internvl`."""
    tower = find_module(model, *towers)
    owner: Any = find_owner(model, "mlp1")
    return TileCall(
        owner=owner,
        method="extract_feature",
        tower=tower,
        run=original(owner, "extract_feature"),
        features=lambda output: output,
        projector=[owner.mlp1],
        inputs=FRAMES,
    ).bind(fields=fields, **options)


def bind_gemma3(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """`get_image_features` with pooling and projection. Arguments: see `bind_internvl`."""
    owner: Any = find_owner(model, "multi_modal_projector")
    run = original(owner, "get_image_features")
    return TileCall(
        owner=owner,
        method="get_image_features",
        tower=find_module(owner, *towers),
        run=lambda tiles: run(tiles, return_dict=True),
        features=_pooled,
        projector=[owner.multi_modal_projector],
        # As its image processor returns it: pan and scan adds that many crops behind the whole image.
        inputs={"image": TileInputs(path="main", counts="num_crops", uncounted=1)},
    ).bind(fields=fields, **options)


def bind_llama4(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """`forward` of the tower, and the projector behind it in the features. Arguments: see `bind_internvl`."""
    tower = find_module(model, *towers)
    if tower is model:
        return bare_tower(tower).bind(fields=fields, **options)
    holder: Any = find_owner(model, "multi_modal_projector")
    projector, run = holder.multi_modal_projector, original(tower, "forward")
    return TileCall(
        owner=tower,
        method="forward",
        tower=tower,
        run=lambda tiles: run(tiles, return_dict=True),
        features=lambda output: projector(_hidden(output)),
        projector=[projector],
        inputs={"image": TileInputs(path="main", counts="patches_per_image")},
    ).bind(fields=fields, **options)


def bind_llava(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """`get_image_features` with the chosen hidden states and the projector. Arguments: see `bind_internvl`.

    The method ends with a list of an entry for each image, which would make a graph of its own of every number of images: the
    graph takes the same hidden states of the tower, and the list is made behind it.
    """
    owner: Any = find_owner(model, "multi_modal_projector")
    tower, config, projector = find_module(owner, *towers), owner.config, owner.multi_modal_projector
    layers, drop = config.vision_feature_layer, int(config.vision_feature_select_strategy == "default")
    layers = [layers] if isinstance(layers, int) else list(layers)
    forward = original(tower, "forward")

    def run(tiles: torch.Tensor) -> Any:
        output = forward(tiles, output_hidden_states=True, return_dict=True)
        chosen = [output.hidden_states[layer][:, drop:] for layer in layers]
        output.pooler_output = projector(torch.cat(chosen, dim=-1))
        return output

    def finish(output: Any) -> Any:
        output.pooler_output = list(output.pooler_output)
        return output

    tile = noise_tile(tower)
    with torch.no_grad():
        example = original(owner, "get_image_features")(tile, return_dict=True)
        example.pooler_output = torch.stack(example.pooler_output)
        check_reentry(tower, _pooled(run(tile)), _pooled(example))
    return TileCall(
        owner=owner,
        method="get_image_features",
        tower=tower,
        run=run,
        features=_pooled,
        example=example,
        finish=finish,
        projector=[projector],
    ).bind(fields=fields, **options)


def bind_idefics3(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """`forward` of the tower for tiles without masked patches, and the connector behind it in the features.

    The tower's embeddings choose positions by a boolean mask, which reads the device. For a whole tile the choice is always the
    same: it is recorded once, and the graph begins behind it. Arguments: see `bind_internvl`.
    """
    tower: Any = find_module(model, *towers)
    tile = noise_tile(tower)
    positions, example = _whole_tile(tower, tile)

    def run(tiles: torch.Tensor) -> Any:
        embeddings = tower.embeddings
        embedded = embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2) + embeddings.position_embedding(positions)
        encoded = tower.encoder(inputs_embeds=embedded, attention_mask=None).last_hidden_state
        return type(example)(last_hidden_state=tower.post_layernorm(encoded))

    with torch.no_grad():
        check_reentry(tower, _hidden(run(tile)), _hidden(example))

    def refuse(mask: Any) -> str | None:
        return None if mask is None or bool(mask.all()) else "tiles with masked patches"

    holder: Any = None if tower is model else find_owner(model, "connector")
    connector = None if holder is None else holder.connector
    return TileCall(
        owner=tower,
        method="forward",
        tower=tower,
        run=run,
        features=_hidden if connector is None else lambda output: connector(_hidden(output)),
        example=type(example)(last_hidden_state=_hidden(example)),
        projector=[] if connector is None else [connector],
        takes=(PIXELS, "patch_attention_mask"),
        refuse=refuse,
    ).bind(fields=fields, **options)


@torch.no_grad()
def _whole_tile(tower: Any, tile: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Positions [1, patches] that the tower looks up for a tile without masked patches, and its output."""
    found: list[torch.Tensor] = []
    hook = tower.embeddings.position_embedding.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone()))
    try:
        output = original(tower, "forward")(tile, return_dict=True)
    finally:
        hook.remove()
    return found[0], output


_ONE_SIZE = "Images and tiles have the size of the vision config; calls with another size run the model's own code."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="InternVL 2-3.5",
        model_types=("internvl", "internvl_vision"),
        classes=("InternVLVisionModel",),
        binder=bind_internvl,
        buffers=("pixel_values",),
        modalities=("image", "video"),
        tokens="(h w / 4) for each tile or frame",
        limits=(_ONE_SIZE,),
    ),
    Architecture(
        name="InternVL 2-3.5 (remote code)",
        model_types=("internvl_chat",),
        classes=("InternVisionModel",),
        binder=bind_internvl_chat,
        buffers=("pixel_values",),
        modalities=("image", "video"),
        tokens="(h w / 4) for each tile or frame",
        remote_code=True,
        limits=(_ONE_SIZE,),
    ),
    Architecture(
        name="Gemma 3",
        model_types=("gemma3",),
        classes=("SiglipVisionModel",),
        binder=bind_gemma3,
        buffers=("pixel_values",),
        tokens="mm_tokens_per_image for the image and for each crop",
        limits=(_ONE_SIZE,),
    ),
    Architecture(
        name="Llama 4",
        model_types=("llama4", "llama4_vision_model"),
        classes=("Llama4VisionModel",),
        binder=bind_llama4,
        buffers=("pixel_values",),
        tokens="(h w / 4) for each tile",
        limits=(_ONE_SIZE, "Rotary positions are complex numbers: Inductor leaves them to PyTorch's own kernels."),
    ),
    Architecture(
        name="LLaVA",
        model_types=("llava",),
        classes=("CLIPVisionModel", "SiglipVisionModel"),
        binder=bind_llava,
        buffers=("pixel_values",),
        tokens="h w (h w + 1 with the class token)",
        limits=(
            _ONE_SIZE,
            "With transformers 5.17 the call returns the hidden states of all layers, and so the graphs hold them: about 30 MB "
            "for each image of LLaVA-1.5.",
        ),
    ),
    Architecture(
        name="Idefics3",
        model_types=("idefics3", "idefics3_vision"),
        classes=("Idefics3VisionTransformer",),
        binder=bind_idefics3,
        buffers=("pixel_values",),
        tokens="h w / scale_factor^2 for each tile",
        limits=(_ONE_SIZE, "Tiles with masked patches run the tower's own code; the processor makes none."),
    ),
    Architecture(
        name="SmolVLM",
        model_types=("smolvlm", "smolvlm_vision"),
        classes=("SmolVLMVisionTransformer",),
        binder=bind_idefics3,
        buffers=("pixel_values",),
        tokens="h w / scale_factor^2 for each tile or frame",
        limits=(_ONE_SIZE, "Tiles with masked patches run the tower's own code; the processor makes none."),
    ),
)
