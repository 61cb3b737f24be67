"""Write the bill of materials of a wheel (CycloneDX 1.6, JSON): python .ci/sbom.py WHEEL SITE_PACKAGES FILE

Components are the dependencies of the extras `server` and `router`, in the versions installed in SITE_PACKAGES. Needs
cyclonedx-python-lib[json-validation] and packaging.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "sglang-laps"
EXTRAS = frozenset({"server", "router"})
TEXT = 60
"""Most characters of a licence name; a field that is longer or has several lines is a licence text."""


def needs(found: Distribution, extras: frozenset[str]) -> list[Requirement]:
    """Return the requirements of a distribution on this platform, with these extras."""
    wanted = map(Requirement, found.requires or ())
    return [r for r in wanted if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in {"", *extras})]


def component(found: Distribution) -> Component:
    """Return the component of an installed distribution."""
    meta, name = found.metadata, canonicalize_name(found.metadata["Name"])
    licence = meta.get("License-Expression") or meta.get("License") or ""
    if len(licence) > TEXT or "\n" in licence:
        licence = ""
    trove = [c.rpartition(" :: ")[2] for c in meta.get_all("Classifier", ()) if c.startswith("License :: ")]
    licence = licence or ", ".join(trove)
    return Component(
        name=name, version=found.version, type=ComponentType.LIBRARY, bom_ref=f"{name}=={found.version}",
        licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
        purl=PackageURL("pypi", name=name, version=found.version),
    )  # fmt: skip


def bill(wheel: Path, site: Path) -> Bom:
    """Return the bill of materials of a wheel. Raises KeyError if a required package is not installed."""
    installed = {canonicalize_name(d.metadata["Name"]): d for d in reversed(list(distributions(path=[str(site)])))}
    bom, parts = Bom(), {NAME: component(installed[NAME])}
    bom.metadata.component = parts[NAME]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    parts[NAME].hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
    todo, seen = [(NAME, EXTRAS)], set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        below = []
        for r in needs(installed[name], extras):
            other = canonicalize_name(r.name)
            if other not in parts:
                parts[other] = component(installed[other])
                bom.components.add(parts[other])
            below.append(parts[other])
            todo.append((other, frozenset(r.extras)))
        bom.register_dependency(parts[name], below)
    return bom


def main(wheel: str, site: str, file: str) -> None:
    """Validate and write the bill of materials of a wheel."""
    text = JsonV1Dot6(bill(Path(wheel), Path(site))).output_as_string(indent=1)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"sbom: {error}")
    Path(file).write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
