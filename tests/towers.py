"""Small vision towers for tests and scripts: tiny random Hugging Face towers, and toys with exact arithmetic.

Every builder is seeded and leaves the global random state alone. Toys need no transformers.

Shapes: T rows (patches), C channels, H heads, D head dim, S segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vit_compile.attention.varlen import varlen_attention

# --- tiny Hugging Face towers -----------------------------------------------------------------------------------------

PATCH = 4
PACKED_CHANNELS = 3 * 2 * PATCH * PATCH
"""Values in one row of `pixel_values` for the packed towers below (channels, frames, height, width of a patch)."""


def pixels(rows: int, seed: int = 0) -> torch.Tensor:
    """Seeded `pixel_values` [rows, PACKED_CHANNELS] for a packed tower."""
    return torch.randn(rows, PACKED_CHANNELS, generator=torch.Generator().manual_seed(seed))


def _seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Build in eval mode with weights large enough that a wrong position or boundary shows in the output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def _packed_config(config_class: Any, attn: str, **values: Any) -> Any:
    config = config_class(num_heads=4, patch_size=PATCH, temporal_patch_size=2, spatial_merge_size=2, **values)
    config._attn_implementation = attn
    return config


def tiny_qwen2_vl(attn: str = "eager", depth: int = 4) -> Any:
    """Qwen2-VL vision tower: full attention, rotary positions."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = _packed_config(Qwen2VLVisionConfig, attn, depth=depth, embed_dim=64, hidden_size=48, mlp_ratio=2)
    return _seeded(lambda: Qwen2VisionTransformerPretrainedModel(config))


def odd_qwen2_5_vl(attn: str = "eager", depth: int = 4) -> Any:
    """Qwen2.5-VL vision tower with an MLP of 44 features, no whole vectors of 16 bytes, as the released one has 3420."""
    return tiny_qwen2_5_vl(attn, depth, intermediate_size=44)


def tiny_qwen2_5_vl(attn: str = "eager", depth: int = 4, intermediate_size: int = 128) -> Any:
    """Qwen2.5-VL vision tower: windows of 4 x 4 patches in even layers, full attention in odd ones."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = _packed_config(
        Qwen2_5_VLVisionConfig,
        attn,
        depth=depth,
        hidden_size=64,
        intermediate_size=intermediate_size,
        out_hidden_size=48,
        window_size=4 * PATCH,
        fullatt_block_indexes=list(range(1, depth, 2)),
    )
    return _seeded(lambda: Qwen2_5_VisionTransformerPretrainedModel(config))


def tiny_qwen3_vl(attn: str = "eager", depth: int = 4) -> Any:
    """Qwen3-VL vision tower: full attention, interpolated learned positions, deepstack features after layer 1."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = _interpolated_config(Qwen3VLVisionConfig, attn, depth, deepstack_visual_indexes=[1])
    return _seeded(lambda: Qwen3VLVisionModel(config))


def tiny_glm4v(attn: str = "eager", depth: int = 4) -> Any:
    """GLM-4.1V vision tower: full attention, learned positions sampled by `grid_thw` inside its forward."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

    config = _glm_config(Glm4vVisionConfig, attn, depth)
    return _seeded(lambda: Glm4vVisionModel(config))


def tiny_qwen3_vl_moe(attn: str = "eager", depth: int = 4) -> Any:
    """Qwen3-VL-MoE vision tower: that of Qwen3-VL, here with deepstack features after layers 0 and 1."""
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    config = _interpolated_config(Qwen3VLMoeVisionConfig, attn, depth, deepstack_visual_indexes=[0, 1])
    return _seeded(lambda: Qwen3VLMoeVisionModel(config))


def tiny_qwen3_5(attn: str = "eager", depth: int = 4) -> Any:
    """Qwen3.5 vision tower: that of Qwen3-VL without deepstack features."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    config = _interpolated_config(Qwen3_5VisionConfig, attn, depth)
    return _seeded(lambda: Qwen3_5VisionModel(config))


def tiny_qwen3_5_moe(attn: str = "eager", depth: int = 4) -> Any:
    """Qwen3.5-MoE vision tower: that of Qwen3.5."""
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    config = _interpolated_config(Qwen3_5MoeVisionConfig, attn, depth)
    return _seeded(lambda: Qwen3_5MoeVisionModel(config))


def tiny_glm4v_moe(attn: str = "eager", depth: int = 4) -> Any:
    """GLM-4.5V vision tower: that of GLM-4.1V."""
    from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig
    from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel

    config = _glm_config(Glm4vMoeVisionConfig, attn, depth)
    return _seeded(lambda: Glm4vMoeVisionModel(config))


def tiny_glm_ocr(attn: str = "eager", depth: int = 4) -> Any:
    """GLM-OCR vision tower: full attention with norms of queries and keys, rotary positions only."""
    from transformers.models.glm_ocr.configuration_glm_ocr import GlmOcrVisionConfig
    from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrVisionModel

    config = _glm_config(GlmOcrVisionConfig, attn, depth)
    return _seeded(lambda: GlmOcrVisionModel(config))


TEXT_WIDTH = 48
VOCABULARY = 112
IMAGE_TOKEN, VIDEO_TOKEN = 110, 111


def tiny_vlm(kind: str, attn: str = "sdpa", **tower: Any) -> Any:
    """A whole model of two text layers around the tower of the same kind.

    Args:
        kind: "qwen2_vl", "qwen2_5_vl", "qwen3_vl" or "glm4v".
        attn: attention of all parts.
        tower: for the tower's builder (`depth`).
    """
    import transformers

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v"}[kind]
    vision = globals()[f"tiny_{kind}"](**{"depth": 3, **tower}).config
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "qwen3_vl":
        text["head_dim"] = TEXT_WIDTH // 4
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision.to_dict(),
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=108,
        vision_end_token_id=109,
        tie_word_embeddings=False,
        attn_implementation=attn,
    )
    return _seeded(lambda: getattr(transformers, f"{name}ForConditionalGeneration")(config))


def _interpolated_config(config_class: Any, attn: str, depth: int, **values: Any) -> Any:
    return _packed_config(
        config_class,
        attn,
        depth=depth,
        hidden_size=64,
        intermediate_size=128,
        out_hidden_size=48,
        num_position_embeddings=64,
        **values,
    )


def _glm_config(config_class: Any, attn: str, depth: int) -> Any:
    return _packed_config(
        config_class, attn, depth=depth, hidden_size=64, intermediate_size=128, out_hidden_size=48, image_size=8 * PATCH
    )


def _dense_config(config_class: Any, attn: str, depth: int, side_patches: int) -> Any:
    config = config_class(
        hidden_size=32,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=side_patches * PATCH,
        patch_size=PATCH,
    )
    config._attn_implementation = attn
    return config


def tiny_dinov2(attn: str = "sdpa", depth: int = 3, side_patches: int = 4) -> Any:
    """DINOv2: class token, any image size ([N, 3, 4 a, 4 b]); `last_hidden_state` [N, 1 + a b, 32]."""
    from transformers import Dinov2Config, Dinov2Model

    config = _dense_config(Dinov2Config, attn, depth, side_patches)
    return _seeded(lambda: Dinov2Model(config))


def tiny_siglip(attn: str = "sdpa", depth: int = 3, side_patches: int = 4) -> Any:
    """SigLIP vision model: no class token, one image size; `last_hidden_state` [N, side_patches**2, 32]."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = _dense_config(SiglipVisionConfig, attn, depth, side_patches)
    return _seeded(lambda: SiglipVisionModel(config))


def tiny_clip(attn: str = "sdpa", depth: int = 3, side_patches: int = 4) -> Any:
    """CLIP vision model: class token, one image size; `last_hidden_state` [N, 1 + side_patches**2, 32]."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = _dense_config(CLIPVisionConfig, attn, depth, side_patches)
    return _seeded(lambda: CLIPVisionModel(config))


# --- an attention operation that counts and is exact ------------------------------------------------------------------

COUNTING_NAME = "vit_compile_test::counting_attention"


class CallCounter:
    """How often `counting_attention` really ran (tracing does not count)."""

    def __init__(self) -> None:
        self.calls = 0

    def reset(self) -> None:
        self.calls = 0


COUNTING_CALLS = CallCounter()


def _counting_attention(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    COUNTING_CALLS.calls += 1
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    segment = torch.searchsorted(cu_seqlens, rows, right=True)  # 1..S inside, S+1 past the last boundary
    sums = x.new_zeros(cu_seqlens.shape[0] + 1, x.shape[1]).index_add_(0, segment, x)
    return (x + sums[segment]).masked_fill((rows >= cu_seqlens[-1])[:, None], 0)


if not hasattr(torch.ops.vit_compile_test, "counting_attention"):
    _library = torch.library.Library("vit_compile_test", "FRAGMENT")
    _library.define(
        "counting_attention(Tensor x, Tensor cu_seqlens, SymInt max_seqlen) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )
    for _device in ("CPU", "CUDA"):
        _library.impl("counting_attention", _counting_attention, _device)
    torch.library.register_fake(
        COUNTING_NAME, lambda x, cu_seqlens, max_seqlen: torch.empty_like(x, memory_format=torch.contiguous_format), lib=_library
    )


def counting_attention(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """Add to each row [T,C] the sum over its segment; zero past the last boundary. Exact for integers below 2**24."""
    return torch.ops.vit_compile_test.counting_attention(x, cu_seqlens, max_seqlen)


# --- toys: packed rows ------------------------------------------------------------------------------------------------

TOY_CHANNELS = 8


def toy_rows(rows: int, seed: int = 0) -> torch.Tensor:
    """Seeded small integers, float32 [rows, TOY_CHANNELS]."""
    return torch.randint(-8, 9, (rows, TOY_CHANNELS), generator=torch.Generator().manual_seed(seed)).float()


def boundaries(lengths: list[int], capacity: int | None = None) -> torch.Tensor:
    """int32 `cu_seqlens` of segments of these lengths; with `capacity`, repeated last values up to capacity + 1 entries."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    ends += [ends[-1]] * (0 if capacity is None else capacity + 1 - len(ends))
    return torch.tensor(ends, dtype=torch.int32)


class ToyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-2, 3, (TOY_CHANNELS, TOY_CHANNELS)).float())
        self.bias = nn.Parameter(torch.randint(-3, 4, (TOY_CHANNELS,)).float())

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = counting_attention(x * 2 - x, cu_seqlens, max_seqlen)
        # Folding back into [0, 64) keeps every number a small integer, so that any order of summation gives equal bits.
        return torch.remainder(torch.remainder(x, 64) @ self.weight + self.bias, 64)


class ToyTower(nn.Module):
    """`depth` layers of identical structure on packed rows [T,8]; integer arithmetic, so equal means equal bits."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyLayer() for _ in range(depth))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        return x + 1


def toy_tower(depth: int = 3, seed: int = 0) -> ToyTower:
    """A seeded `ToyTower` in eval mode with integer weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ToyTower(depth).eval()


class NormViewBlock(nn.Module):
    """A Qwen3-style block: the q/k norm regroups by head and goes back with `view(q.shape)`, a size taken from a tensor."""

    def __init__(self, channels: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, channels // heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6), nn.RMSNorm(self.head_dim, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def attention(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q_by_head = q.reshape(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
        q = self.q_norm(q_by_head).view(q.shape)
        k_by_head = k.reshape(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
        k = self.k_norm(k_by_head).view(k.shape)
        q, k, v = (y.view(-1, self.heads, self.head_dim) for y in (q, k, v))
        return self.proj(varlen_attention(q, k, v, cu_seqlens, max_seqlen, self.head_dim**-0.5).flatten(1))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cu_seqlens, max_seqlen)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class NormViewTower(nn.Module):
    """Patch projection [T,12] -> [T,C], then `NormViewBlock`s through `vit_compile::varlen_attention`."""

    def __init__(self, depth: int = 3, channels: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(12, channels)
        self.blocks = nn.ModuleList(NormViewBlock(channels, heads) for _ in range(depth))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return x


def norm_view_tower(depth: int = 3, channels: int = 32, heads: int = 4) -> NormViewTower:
    """A seeded `NormViewTower` in eval mode; input [T,12]."""
    return _seeded(lambda: NormViewTower(depth, channels, heads))


ROW_MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x + x.mean(dim=0, keepdim=True),
    "softmax": lambda x: x * torch.softmax(x, dim=0),
    "count": lambda x: x / x.shape[0],
}


class RowMixingTower(nn.Module):
    """Rows depend on all rows (or on their number) outside attention, so padding changes real rows: it must be refused."""

    def __init__(self, kind: str, channels: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.before, self.after = nn.Linear(12, channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = ROW_MIXERS[self.kind](self.before(x))
        heads = x.unflatten(1, (2, -1))
        return self.after(varlen_attention(heads, heads, heads, cu_seqlens, max_seqlen, 0.5).flatten(1))


def row_mixing_tower(kind: str) -> RowMixingTower:
    """A seeded `RowMixingTower` in eval mode; kinds: the keys of `ROW_MIXERS`; input [T,12]."""
    return _seeded(lambda: RowMixingTower(kind))


@torch.compiler.disable
def _outside_the_graph(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5


class GraphBreakTower(nn.Module):
    """A function that may not be traced lies between two layers, so Dynamo makes two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = NormViewTower(1), NormViewBlock()

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = _outside_the_graph(self.first(x, cu_seqlens, max_seqlen))
        return self.second(x, cu_seqlens, max_seqlen)


def graph_break_tower() -> GraphBreakTower:
    """A seeded `GraphBreakTower` in eval mode; input [T,12]."""
    return _seeded(GraphBreakTower)


class HostReadTower(nn.Module):
    """Reads a device value on the host in its forward: a graph break, or an operation that no capture may contain."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = NormViewTower(1)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        count = cu_seqlens[-1].item()
        return self.tower(x, cu_seqlens, max_seqlen) * count


def host_read_tower() -> HostReadTower:
    """A seeded `HostReadTower` in eval mode; input [T,12]."""
    return _seeded(HostReadTower)


# --- toys: calling conventions ----------------------------------------------------------------------------------------


@dataclass
class DataclassOutput:
    features: torch.Tensor
    layers: tuple[torch.Tensor, ...]
    pooled: torch.Tensor | None = None


class DataclassTower(nn.Module):
    """Keyword-only arguments in, a plain dataclass out: a tensor, a tuple of tensors, and a None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(NormViewBlock() for _ in range(2))

    def forward(self, *, patches: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> DataclassOutput:
        x, layers = self.embed(patches), []
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
            layers.append(x * 2)
        return DataclassOutput(features=x, layers=tuple(layers))


def dataclass_tower() -> DataclassTower:
    """A seeded `DataclassTower` in eval mode; `patches` [T,12]."""
    return _seeded(DataclassTower)
