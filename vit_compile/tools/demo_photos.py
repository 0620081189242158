"""The demo's photographs: files that scikit-image and scikit-learn ship inside their packages.

Nothing is downloaded and neither package is imported; drawings, charts and near-duplicates of the same scene are left out.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from vit_compile.errors import MissingDependencyError
from vit_compile.tools.dependencies import require

FEWEST_PHOTOS = 12

_SKIMAGE = "skimage/data"
_SKLEARN = "sklearn/datasets/images"
_PHOTOGRAPHS = (
    ("astronaut", f"{_SKIMAGE}/astronaut.png"),
    ("bricks", f"{_SKIMAGE}/brick.png"),
    ("photographer", f"{_SKIMAGE}/camera.png"),
    ("cell", f"{_SKIMAGE}/cell.png"),
    ("cat", f"{_SKIMAGE}/chelsea.png"),
    ("clock", f"{_SKIMAGE}/clock_motion.png"),
    ("coffee", f"{_SKIMAGE}/coffee.png"),
    ("coins", f"{_SKIMAGE}/coins.png"),
    ("grass", f"{_SKIMAGE}/grass.png"),
    ("gravel", f"{_SKIMAGE}/gravel.png"),
    ("galaxies", f"{_SKIMAGE}/hubble_deep_field.jpg"),
    ("tissue", f"{_SKIMAGE}/ihc.png"),
    ("moon", f"{_SKIMAGE}/moon.png"),
    ("motorcycle", f"{_SKIMAGE}/motorcycle_left.png"),
    ("page", f"{_SKIMAGE}/page.png"),
    ("retina", f"{_SKIMAGE}/retina.jpg"),
    ("rocket", f"{_SKIMAGE}/rocket.jpg"),
    ("handwriting", f"{_SKIMAGE}/text.png"),
    ("temple", f"{_SKLEARN}/china.jpg"),
    ("flower", f"{_SKLEARN}/flower.jpg"),
)


@dataclass(frozen=True, slots=True)
class Photo:
    """One photograph on disk."""

    name: str
    path: Path


def demo_photos() -> list[Photo]:
    """The photographs that are there, in a fixed order.

    Raises:
        MissingDependencyError: a package is missing, or ships fewer photographs than the demo needs.
    """
    require("skimage", "sklearn", extra="demo")
    photos = [Photo(name, path) for name, relative in _PHOTOGRAPHS if (path := _locate(relative)) is not None]
    if len(photos) < FEWEST_PHOTOS:
        raise MissingDependencyError(
            f"the installed scikit-image and scikit-learn ship {len(photos)} of the demo's photographs and {FEWEST_PHOTOS} are "
            'needed: pip install --upgrade "vit_compile[demo]".'
        )
    return photos


def _locate(relative: str) -> Path | None:
    package, _, rest = relative.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(folder) / rest
        if path.is_file():
            return path
    return None
