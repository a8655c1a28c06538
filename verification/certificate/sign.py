"""Signs a run: an in-toto Statement v1 with the test-result predicate in a DSSE envelope (ed25519)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from verification.certificate.keys import key_id, public_pem
from verification.certificate.outcomes import Outcome
from verification.certificate.provenance import file_digest
from verification.certificate.verdict import ExitCode

ENVELOPE = "attestation.dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
EXTENSION = "blink_run"
ENGINE_PREFIX = "engine:"


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """The bytes that DSSE signs: "DSSEv1", then type and payload, each with its length in front."""
    kind = payload_type.encode("utf-8")
    return b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no white space, as UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def files_beside(folder: Path) -> dict[str, Path]:
    """All files under `folder` by their relative name, except the envelope itself."""
    return {
        name: path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) != ENVELOPE
    }


def statement(folder: Path, report: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """The in-toto statement about a run whose files lie in `folder`.

    Subjects are every file of the run and the compiled modules of the engine. The predicate is the standard one, with
    one extension field.
    """
    subjects = [{"name": name, "digest": {"sha256": file_digest(path)}} for name, path in files_beside(folder).items()]
    subjects += [
        {"name": f"{ENGINE_PREFIX}{name}", "digest": {"sha256": digest}}
        for name, digest in report["digests"]["engine"].items()
    ]
    digests = {"required.yaml": report["digests"]["required"], "thresholds.yaml": report["digests"]["thresholds"]}
    model = report["claim"]["model"]
    configuration = [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items() if digest]
    if model["sha256"]:
        configuration.append({"name": f"model:{model['name']}", "digest": {"sha256": model["sha256"]}})
    by_outcome: dict[str, list[str]] = {}
    for test in report["tests"]:
        by_outcome.setdefault(test["outcome"], []).append(test["id"])
    undecided = (Outcome.PRODUCT_FAILURE, Outcome.INFRASTRUCTURE, Outcome.TEST_DEFECT, Outcome.UNKNOWN, Outcome.BLOCKED)
    passed = report["verdict"]["exit_code"] == ExitCode.PASS
    return {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": ("WARNED" if report["warnings"] else "PASSED") if passed else "FAILED",
            "configuration": configuration,
            "passedTests": by_outcome.get(Outcome.PASSED, []),
            "warnedTests": [],
            "failedTests": [test for outcome in undecided for test in by_outcome.get(outcome, [])],
            EXTENSION: {
                "kind": report["kind"],
                "claim": report["claim"],
                "run": {name: report["run"][name] for name in ("id", "rig", "profile", "seed", "started", "ended")},
                "source": report["source"],
                "digests": report["digests"],
                "counts": report["counts"],
                "not_run": [test["id"] for test in report["not_run"]],
                "verdict": report["verdict"],
                "signer": {"keyid": key_id(key.public_key()), "public_key": public_pem(key.public_key())},
            },
        },
    }


def envelope(payload: bytes, key: Ed25519PrivateKey) -> bytes:
    """A DSSE envelope of `payload`, in canonical JSON."""
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return canonical(
        {
            "payload": base64.b64encode(payload).decode("ascii"),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode("ascii")}],
        }
    )


def sign(folder: Path, report: dict[str, Any], key: Ed25519PrivateKey) -> Path:
    """Sign everything in `folder`; returns the path of the envelope. Nothing in the folder may change afterwards."""
    path = folder / ENVELOPE
    path.write_bytes(envelope(canonical(statement(folder, report, key)), key))
    return path
