"""`save_cache` and `load_cache`: what a process found out at start-up, carried to another machine of the same kind.

A cache is one zip file: compiled pieces as torch's compiler caches keep them, the chosen attention kernels, the machine code of
the project's own ones, and the measured times of graphs. It holds no weights. It belongs to the software and the device that
wrote it, which its manifest names: on anything else it is ignored, with the reason. Compiled pieces and machine code will run:
load only files that you trust.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vit_compile import _torch_compat as compat
from vit_compile.attention import choice, machine_code
from vit_compile.attention.choice import Choice
from vit_compile.attention.problem import Problem
from vit_compile.errors import first_line
from vit_compile.runtime import known_costs
from vit_compile.runtime.known_costs import Costs
from vit_compile.stats import logger

FORMAT = 5
_MANIFEST, _KERNELS, _COSTS, _PIECES = "manifest.json", "attention.json", "costs.json", "pieces/"
_TRITON = "triton/"


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a cache file held, or why it was not used."""

    path: str

    reason: str | None
    """Why nothing was loaded; None if the cache was used, or written."""

    pieces: int = 0
    """Compiled pieces."""

    kernels: int = 0
    """Attention problems with a chosen kernel."""

    binaries: int = 0
    """Kernels of the project's own that need no compile."""

    encoders: int = 0
    """Encoders with measured times."""

    @property
    def used(self) -> bool:
        """Was it loaded, or written?"""
        return self.reason is None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.path} is not used: {self.reason}"
        kernels = f"{self.kernels} attention kernels, machine code of {self.binaries}"
        return f"{self.path}: {self.pieces} compiled pieces, {kernels}, times of {self.encoders} encoders"


def save_cache(path: str | os.PathLike[str]) -> CacheReport:
    """Write what this process compiled, chose and measured; call it after `capture()`, with the encoders still alive.

    Args:
        path: a file; replaced at once or not at all.

    Returns:
        How much there was. Only pieces that Inductor compiled are kept (not `compiler="eager"` or `"aot_eager"`).

    Raises:
        OSError: the file cannot be written.
    """
    pieces = sorted(set(compat.compiled_artifacts()))
    kernels = [
        {"device": device, "problem": problem.as_dict(), "fence_from": fence_from, **_written(chosen)}
        for (device, problem, fence_from), chosen in choice.known().items()
    ]
    binaries = machine_code.collected()
    costs = {name: found.as_dict() for name, found in known_costs.measured().items()}
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, json.dumps(_environment(), indent=1))
            archive.writestr(_KERNELS, json.dumps(kernels))
            archive.writestr(_COSTS, json.dumps(costs))
            for number, piece in enumerate(pieces):
                archive.writestr(f"{_PIECES}{number:04d}", piece)
            for name, files in binaries.items():
                for member, data in files.items():
                    archive.writestr(f"{_TRITON}{name}/{member}", data)
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is the user's alone
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return CacheReport(str(target), None, len(pieces), len(kernels), len(binaries), len(costs))


def load_cache(path: str | os.PathLike[str]) -> CacheReport:
    """Take over what another process saved; call it before the first `capture()`.

    Compiled pieces go to torch's own cache folder and machine code to Triton's, from where the two take them. A file that is
    missing, damaged, or from other software or another kind of device changes nothing: the report says why, and so does a warning
    in the log.

    Args:
        path: what `save_cache` wrote, by somebody you trust: compiled pieces and kernels are code.
    """
    name = os.fspath(path)
    try:
        with zipfile.ZipFile(name) as archive:
            foreign = _difference(json.loads(archive.read(_MANIFEST)))
            if foreign is not None:
                return _unused(name, foreign)
            kernels = dict(_read(row) for row in json.loads(archive.read(_KERNELS)))
            costs = {key: Costs.from_dict(found) for key, found in json.loads(archive.read(_COSTS)).items()}
            pieces = [archive.read(member) for member in archive.namelist() if member.startswith(_PIECES)]
            binaries = _machine_code(archive)
    except FileNotFoundError:
        return _unused(name, "there is no such file")
    except OSError as error:
        return _unused(name, f"it cannot be read ({error.strerror or error})")
    except Exception as error:  # a damaged archive fails in many ways, and a start without a cache is only slower
        return _unused(name, f"it is damaged ({type(error).__name__}: {first_line(error)})")
    loaded = sum(map(compat.load_artifacts, pieces))
    if loaded < len(pieces):
        logger.warning("%s: %d of %d compiled pieces cannot be read", name, len(pieces) - loaded, len(pieces))
    choice.learn(kernels)
    known_costs.load(costs)
    return CacheReport(name, None, loaded, len(kernels), machine_code.place(binaries), len(costs))


def _machine_code(archive: zipfile.ZipFile) -> dict[str, machine_code.Files]:
    found: dict[str, machine_code.Files] = {}
    for member in archive.namelist():
        if member.startswith(_TRITON):
            name, _, file = member.removeprefix(_TRITON).partition("/")
            found.setdefault(name, {})[file] = archive.read(member)
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unused(name: str, reason: str) -> CacheReport:
    report = CacheReport(name, reason)
    logger.warning("cache %s", report)
    return report


def _environment() -> dict[str, Any]:
    """What a cache belongs to."""
    has_gpu = torch.cuda.is_available()
    return {
        "format": FORMAT,
        "vit_compile": _version("vit_compile"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version_tuple()[:2],
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if has_gpu else torch.backends.cpu.get_cpu_capability(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _difference(manifest: dict[str, Any]) -> str | None:
    """Why a cache with this manifest does not belong here, or None."""
    here = json.loads(json.dumps(_environment()))
    for key, value in here.items():
        if manifest.get(key) != value:
            return f"it was written for {key} {manifest.get(key)!r}, and this is {value!r}"
    return None


def _written(chosen: Choice) -> dict[str, Any]:
    return {"kernel": chosen.kernel, "microseconds": chosen.microseconds, "refused": chosen.refused}


def _read(row: dict[str, Any]) -> tuple[choice.Key, Choice]:
    key = (str(row["device"]), Problem.from_dict(row["problem"]), int(row["fence_from"]))
    return key, Choice(str(row["kernel"]), dict(row["microseconds"]), dict(row["refused"]))
