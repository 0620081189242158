"""Optional packages: asked for in one place, before anything slow starts."""

from __future__ import annotations

import importlib.util

from vit_compile.errors import MissingDependencyError

_PACKAGE_OF_MODULE = {"PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}


def require(*modules: str, extra: str) -> None:
    """Checks that modules can be found, without importing them.

    Args:
        modules: import names.
        extra: the extra of this package that brings them.
    Raises:
        MissingDependencyError: naming what is missing and the extra.
    """
    missing = [_PACKAGE_OF_MODULE.get(module, module) for module in modules if not has(module)]
    if missing:
        raise MissingDependencyError(f'this command needs {", ".join(missing)}: pip install "vit_compile[{extra}]".')


def has(module: str) -> bool:
    """Can this module be found? It is not imported; a dotted name imports its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
