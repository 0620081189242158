"""Hugging Face towers through our attention name, against untouched towers with eager or sdpa attention."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests import towers
from tests.towers import boundaries
from vit_compile.errors import MissingDependencyError, ModelError
from vit_compile.models import hf_attention
from vit_compile.models.hf_attention import ATTENTION_NAME, attention_forward, register, use_attention

pytest.importorskip("transformers")


def states(batch: int, rows: int, heads: int = 2, dim: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """Seeded query, key and value [batch, heads, rows, dim], as towers hand them over."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, rows, dim, generator=generator) for _ in range(3)]


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[N,H,T,D] -> [N,T,H,D], written out."""
    return (torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v).transpose(1, 2)


def test_name_contains_flash() -> None:
    """Towers hand over boundaries only to a name with "flash" in it."""
    assert "flash" in ATTENTION_NAME


def test_register_is_idempotent_and_brings_the_mask() -> None:
    """Registering twice is fine, and the mask function is sdpa's: without one, towers would attend to their padding."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    register()
    register()
    assert AttentionInterface()[ATTENTION_NAME] is attention_forward
    assert AttentionMaskInterface()[ATTENTION_NAME] is sdpa_mask


def test_boundaries_separate_segments() -> None:
    """With boundaries each segment attends within itself; the layout of the output is [1,T,H,D]."""
    q, k, v = states(1, 9)
    out, weights = attention_forward(nn.Identity(), q, k, v, scaling=0.3, cu_seq_lens_q=boundaries([4, 5]), max_length_q=5)
    parts = [softmax_attention(*(x[:, :, a:b] for x in (q, k, v)), 0.3) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(out, torch.cat(parts, dim=1), atol=1e-6, rtol=0)
    assert weights is None


def test_scaling_none_is_the_usual_one() -> None:
    """`scaling=None` means D**-0.5, with boundaries and without."""
    q, k, v = states(1, 6)
    want = softmax_attention(q, k, v, 8**-0.5)
    packed, _ = attention_forward(nn.Identity(), q, k, v, cu_seq_lens_q=boundaries([6]), max_length_q=6)
    dense, _ = attention_forward(nn.Identity(), q, k, v, is_causal=False)
    torch.testing.assert_close(packed, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(dense, want, atol=1e-6, rtol=0)


def test_missing_bound_means_all_rows() -> None:
    """Without `max_length_q` the row count is the bound, which is always enough; int64 boundaries are accepted."""
    q, k, v = states(1, 6)
    given, _ = attention_forward(nn.Identity(), q, k, v, cu_seq_lens_q=boundaries([2, 4]), max_length_q=4)
    default, _ = attention_forward(nn.Identity(), q, k, v, cu_seq_lens_q=boundaries([2, 4]).long())
    assert torch.equal(given, default)


def test_unknown_keywords_are_ignored_with_boundaries() -> None:
    """Towers pass on whatever they did not consume."""
    q, k, v = states(1, 6)
    out, _ = attention_forward(
        nn.Identity(), q, k, v, None, cu_seq_lens_q=boundaries([6]), cu_seq_lens_k=None, max_length_k=6, position_ids=0
    )
    assert out.shape == (1, 6, 2, 8)


def test_dense_mask_is_kept() -> None:
    """Without boundaries the mask decides who sees whom."""
    q, k, v = states(2, 5)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[:, :, :, 3:] = False
    out, _ = attention_forward(nn.Identity(), q, k, v, mask, scaling=0.5)
    want = softmax_attention(q, k[:, :, :3], v[:, :, :3], 0.5)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)


def test_grouped_heads() -> None:
    """Fewer key and value heads are repeated in order."""
    q, k, v = states(1, 6, heads=4)
    few = (k[:, ::2], v[:, ::2])
    out, _ = attention_forward(nn.Identity(), q, *few, scaling=0.5, cu_seq_lens_q=boundaries([6]), max_length_q=6)
    want = softmax_attention(q, *(x.repeat_interleave(2, dim=1) for x in few), 0.5)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("keywords", "batch", "words"),
    [({"dropout": 0.1}, 1, "no dropout"), ({"is_causal": True}, 1, "not causal"), ({}, 2, "2 batch items")],
)
def test_what_varlen_attention_cannot_do_is_refused(keywords: dict[str, Any], batch: int, words: str) -> None:
    """Dropout, causal masks and more than one packed item are errors, never dropped silently."""
    q, k, v = states(batch, 4)
    with pytest.raises(ModelError, match=words):
        attention_forward(nn.Identity(), q, k, v, cu_seq_lens_q=boundaries([4]), max_length_q=4, **keywords)


@pytest.mark.parametrize("build", [towers.tiny_dinov2, towers.tiny_siglip, towers.tiny_clip])
def test_dense_towers_do_not_change(build: Any) -> None:
    """A dense tower gives the same numbers under our name as under sdpa."""
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    stock, ours = build(), build()
    use_attention(ours)
    with torch.no_grad():
        assert torch.equal(stock(images).last_hidden_state, ours(images).last_hidden_state)


def test_use_attention_changes_the_config_object() -> None:
    """The documented trap: a tower built from the same config object switches too; one with its own config does not."""
    first, second = towers.tiny_clip(), towers.tiny_clip()
    twin = type(first)(first.config)
    use_attention(first)
    assert twin.config._attn_implementation == ATTENTION_NAME
    assert second.config._attn_implementation == "sdpa"


def test_use_attention_refuses_what_is_not_a_tower() -> None:
    """A module without a config, and a whole vision-language model, are errors that say what to pass."""
    with pytest.raises(ModelError, match="no transformers config"):
        use_attention(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(_attn_implementation="sdpa", vision_config=SimpleNamespace())
    with pytest.raises(ModelError, match="whole model"):
        use_attention(model)


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the error says what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"vit_compile\[hf\]"):
        hf_attention.register()
