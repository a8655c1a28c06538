"""JUnit XML made from a run's records, where no single pytest session has seen them all."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord

_ELEMENT = {
    Outcome.PRODUCT_FAILURE: "failure",
    Outcome.INFRASTRUCTURE: "error",
    Outcome.TEST_DEFECT: "error",
    Outcome.UNKNOWN: "error",
    Outcome.BLOCKED: "error",
    Outcome.FILTERED: "skipped",
    Outcome.SKIPPED: "skipped",
    Outcome.MISSING: "skipped",
}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


def write(path: Path, name: str, records: Sequence[TestRecord]) -> None:
    """Writes one test suite `name` of all records: class is the property, name the own id."""
    counts = {kind: sum(_ELEMENT.get(r.outcome) == kind for r in records) for kind in ("failure", "error", "skipped")}
    attributes = {
        "name": name,
        "tests": str(len(records)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
        "time": f"{sum(r.duration_s for r in records):.3f}",
    }
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", attributes)
    for record in records:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            {"classname": record.property or "other", "name": record.id, "time": f"{record.duration_s:.3f}"},
        )
        properties = ElementTree.SubElement(case, "properties")
        for key, value in (("blink_id", record.id), ("blink_outcome", str(record.outcome))):
            ElementTree.SubElement(properties, "property", {"name": key, "value": value})
        kind = _ELEMENT.get(record.outcome)
        if kind is not None:
            message = _NOT_XML.sub("?", record.message)
            ElementTree.SubElement(case, kind, {"message": message}).text = _NOT_XML.sub("?", record.details)
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)
