"""Handing features out: every one is a tensor of its own, whatever memory it was computed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch


def owned(features: Sequence[torch.Tensor], graph_outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The features with memory of their own: copies of those that lie in a graph's memory or share theirs with another.

    Args:
        features: of one batch.
        graph_outputs: outputs of graphs that the next replay overwrites.
    """
    storages = [feature.untyped_storage().data_ptr() for feature in features]
    shared = {output.untyped_storage().data_ptr() for output in graph_outputs}
    shared.update(storage for storage, count in Counter(storages).items() if count > 1)
    if len(set(storages)) == 1 and storages[0] in shared and _are_rows_of_one(features):
        # One kernel instead of one for each.
        whole = features[0].as_strided((sum(len(f) for f in features), features[0].shape[1]), features[0].stride())
        pieces: Sequence[torch.Tensor] = torch.ops.aten.split_with_sizes_copy(whole, [len(feature) for feature in features])
        return list(pieces)
    return [f.clone() if storage in shared else f for f, storage in zip(features, storages, strict=True)]


def _are_rows_of_one(features: Sequence[torch.Tensor]) -> bool:
    """Are these the consecutive rows of one contiguous matrix?"""
    if len(features) < 2:
        return False
    first = features[0]
    expected = first.data_ptr()
    for feature in features:
        if feature.dim() != 2 or not feature.is_contiguous() or feature.shape[1:] != first.shape[1:] or len(feature) == 0:
            return False
        if feature.dtype != first.dtype or feature.data_ptr() != expected:
            return False
        expected += feature.numel() * feature.element_size()
    return True
