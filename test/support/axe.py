"""Accessibility check of a page by axe-core, which runs inside the page and is fetched once with npm (not in git)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from base64 import b64encode
from hashlib import sha512
from pathlib import Path

import pytest
from browser import Page

PACKAGE = "axe-core@4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
"""Digest of the package that npm makes (Base64)."""
FETCH_S = 120.0


def script(folder: Path) -> str:
    """Return the source of axe-core. `folder` keeps the package. Skips the test if npm cannot fetch the package."""
    kept = folder / f"{PACKAGE}.tgz"
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"no npm here to fetch {PACKAGE}")
        with tempfile.TemporaryDirectory(dir=folder) as made:
            command = [npm, "pack", PACKAGE, "--ignore-scripts", "--silent"]
            try:
                subprocess.run(command, cwd=made, timeout=FETCH_S, check=True, capture_output=True)
            except (subprocess.SubprocessError, OSError) as e:
                pytest.skip(f"{PACKAGE} cannot be fetched here: {e}")
            (package,) = Path(made).glob("*.tgz")
            os.replace(package, kept)
    found = b64encode(sha512(kept.read_bytes()).digest()).decode()
    assert found == SHA512, f"{kept} is another {PACKAGE}"
    with tarfile.open(kept) as files:
        source = files.extractfile("package/axe.min.js")
        assert source
        return source.read().decode()


FINDINGS = """axe.run(document, {resultTypes: ["violations"]}).then(r => r.violations.map(
  v => `${v.id}: ${v.help} (${v.nodes.slice(0, 3).map(n => n.html.slice(0, 160)).join(" | ")})`))"""


async def findings(page: Page, source: str) -> list[str]:
    """Return the violations of axe's default rules on the page. `source`: see script."""
    if not await page.evaluate("typeof axe === 'object'"):
        await page.evaluate(f"{source}; 0")
    found: list[str] = await page.evaluate(FINDINGS)
    return found
