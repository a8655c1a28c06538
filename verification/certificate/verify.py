"""Verifies a signed run offline: signature, files, schema, and the verdict recomputed from the tests' outcomes."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from verification.certificate import interruptions, provenance, required
from verification.certificate.keys import key_id
from verification.certificate.outcomes import Outcome
from verification.certificate.report import (
    REQUIRED_SET,
    ReportError,
    is_certificate,
    missed,
    outcomes_of,
    recompute,
    replay_warnings,
    validate,
)
from verification.certificate.sign import (
    ENGINE_PREFIX,
    ENVELOPE,
    EXTENSION,
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    canonical,
    files_beside,
    pre_authentication_encoding,
)

_REPORT = "report.json"
_REQUIRED = "required.yaml"
_THRESHOLDS = "thresholds.yaml"


class VerificationError(Exception):
    """The run is not what was signed, or what was signed contradicts itself."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`.

    `valid`: signature, files, schema and verdict agree and nothing is void. `trusted`: in addition the signer's key is
    one of the trusted keys. Without trusted keys this is about integrity only: anyone could have signed it.
    """

    valid: bool
    trusted: bool
    key_id: str | None
    verdict: str | None
    kind: str | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def summary(self) -> str:
        if not self.valid:
            return "INVALID"
        return (
            "valid, signed by a trusted key"
            if self.trusted
            else "integrity only: no trusted key vouches for the signer"
        )


def resolve(path: Path) -> Path:
    """The envelope meant by a run's folder or by any file in it."""
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not (folder / ENVELOPE).is_file():
        raise FileNotFoundError(f"{folder} holds no {ENVELOPE}")
    return folder / ENVELOPE


def verify(path: Path, trust: Sequence[Ed25519PublicKey] = ()) -> Verification:
    """Verify the run in a folder.

    Args:
        path: the folder, its envelope, or any other file of the run.
        trust: public keys that may sign. With none, the signer named in the statement itself is used, which shows that
            nothing was changed since, but not who signed.

    Raises `FileNotFoundError` where there is no envelope; everything else that is wrong is in the result.
    """
    envelope_path = resolve(path)
    folder = envelope_path.parent
    signer: str | None = None
    try:
        payload, signature, signer = _open_envelope(envelope_path.read_bytes())
        statement = _statement(payload)
        trusted = _check_signature(payload, signature, signer, statement, trust)
        _check_files(folder, statement)
        report = _report(folder)
        _check_statement(statement, report)
        notes = _check_verdict(folder, report)
    except VerificationError as error:
        return Verification(False, False, signer, None, None, problems=(str(error),))
    return Verification(
        True, trusted, signer, report["verdict"]["word"], report["kind"], notes=(*notes, *_engine_notes(statement))
    )


def _decode(text: Any, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise VerificationError(f"envelope: {what} is not base64: {error}") from error
    if base64.b64encode(data).decode("ascii") != text:
        raise VerificationError(f"envelope: {what} is not canonical base64")
    return data


def _open_envelope(raw: bytes) -> tuple[bytes, bytes, str]:
    """Payload, signature and key id. The envelope must be byte for byte what this tool writes."""
    try:
        envelope = json.loads(raw)
        (entry,) = envelope["signatures"]
        payload_type, payload, signature, signer = (
            envelope["payloadType"],
            envelope["payload"],
            entry["sig"],
            entry["keyid"],
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise VerificationError(f"envelope: not a DSSE envelope with one signature: {error}") from error
    if set(envelope) != {"payload", "payloadType", "signatures"} or set(entry) != {"keyid", "sig"}:
        raise VerificationError("envelope: it has fields beside those of DSSE")
    if canonical(envelope) != raw:
        raise VerificationError("envelope: it is not in canonical form")
    if payload_type != PAYLOAD_TYPE:
        raise VerificationError(f"envelope: payload type is {payload_type!r}, it must be {PAYLOAD_TYPE!r}")
    return _decode(payload, "payload"), _decode(signature, "signature"), str(signer)


def _statement(payload: bytes) -> dict[str, Any]:
    try:
        statement = json.loads(payload)
        kinds = (statement["_type"], statement["predicateType"])
        extension = statement["predicate"][EXTENSION]
        names = [(subject["name"], subject["digest"]["sha256"]) for subject in statement["subject"]]
        extension["signer"]["public_key"], extension["digests"], extension["verdict"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise VerificationError(f"statement: not an in-toto statement about a Blink run: {error!r}") from error
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise VerificationError(f"statement: types are {kinds}, they must be {(STATEMENT_TYPE, PREDICATE_TYPE)}")
    if len(dict(names)) != len(names):
        raise VerificationError("statement: a subject is named twice")
    found: dict[str, Any] = statement
    return found


def _check_signature(
    payload: bytes, signature: bytes, signer: str, statement: dict[str, Any], trust: Sequence[Ed25519PublicKey]
) -> bool:
    """True when a trusted key signed; raises when the signature is wrong or, with trusted keys, is none of theirs."""
    key = next((key for key in trust if key_id(key) == signer), None)
    if trust and key is None:
        known = ", ".join(key_id(key)[:16] for key in trust)
        raise VerificationError(f"signature: made by key {signer[:16]}, which is not trusted (trusted: {known})")
    if key is None:
        try:
            loaded = serialization.load_pem_public_key(
                statement["predicate"][EXTENSION]["signer"]["public_key"].encode("ascii")
            )
        except (ValueError, AttributeError) as error:
            raise VerificationError(f"statement: the signer's public key cannot be read: {error}") from error
        if not isinstance(loaded, Ed25519PublicKey) or key_id(loaded) != signer:
            raise VerificationError("statement: the signer's public key does not belong to the envelope's key id")
        key = loaded
    try:
        key.verify(signature, pre_authentication_encoding(PAYLOAD_TYPE, payload))
    except InvalidSignature as error:
        raise VerificationError(f"signature: it does not belong to this statement (key {signer[:16]})") from error
    return bool(trust)


def _check_files(folder: Path, statement: dict[str, Any]) -> None:
    signed = {
        subject["name"]: subject["digest"]["sha256"]
        for subject in statement["subject"]
        if not subject["name"].startswith(ENGINE_PREFIX)
    }
    present = files_beside(folder)
    for name in sorted(signed.keys() - present.keys()):
        raise VerificationError(f"file {name} was signed and is absent")
    for name in sorted(present.keys() - signed.keys()):
        raise VerificationError(f"file {name} is here and was not signed")
    for name, path in present.items():
        digest = provenance.file_digest(path)
        if digest != signed[name]:
            raise VerificationError(f"file {name} was changed: sha256 {digest}, signed {signed[name]}")


def _report(folder: Path) -> dict[str, Any]:
    path = folder / _REPORT
    if not path.is_file():
        raise VerificationError(f"{_REPORT} is not among the signed files")
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        validate(report)
    except (ValueError, ReportError, RecursionError) as error:
        raise VerificationError(f"schema: {error}") from error
    return report


def _check_statement(statement: dict[str, Any], report: dict[str, Any]) -> None:
    """What the statement says in its own words must be what the report says."""
    predicate = statement["predicate"]
    extension = predicate[EXTENSION]
    for name in ("kind", "claim", "source", "digests", "counts", "verdict"):
        if extension.get(name) != report[name]:
            raise VerificationError(f"statement: its {name} is not that of {_REPORT}")
    passed = [test["id"] for test in report["tests"] if test["outcome"] == Outcome.PASSED]
    if predicate.get("passedTests") != passed:
        raise VerificationError(f"statement: its passed tests are not those of {_REPORT}")
    if (predicate.get("result") == "FAILED") != (report["verdict"]["exit_code"] != 0):
        raise VerificationError(f"statement: its result {predicate.get('result')!r} contradicts the verdict")


def _check_verdict(folder: Path, report: dict[str, Any]) -> list[str]:
    """Recompute counts and verdict from the tests; returns notes. Raises when they differ or the run is void."""
    counts = {str(outcome): sum(test["outcome"] == outcome for test in report["tests"]) for outcome in Outcome}
    if counts != report["counts"]:
        raise VerificationError(f"counts: {report['counts']} stand in the report, its tests give {counts}")
    texts = {_REQUIRED: report["digests"]["required"], _THRESHOLDS: report["digests"]["thresholds"]}
    for name, digest in texts.items():
        path = folder / name
        found = provenance.file_digest(path) if path.is_file() else None
        if found != digest:
            raise VerificationError(f"{name}: sha256 {found}, the report says {digest}")
    rig = report["run"]["rig"]
    try:
        wanted = required.parse((folder / _REQUIRED).read_text(encoding="utf-8"), _REQUIRED)
        verdict = recompute(report, wanted)
    except required.RequiredSetError as error:
        raise VerificationError(str(error)) from error
    stated = (report["verdict"]["exit_code"], report["verdict"]["word"], tuple(report["verdict"]["reasons"]))
    if stated != (int(verdict.exit_code), verdict.word, verdict.reasons):
        raise VerificationError(f"verdict: the report says {stated[1]!r}, its tests give {verdict.word!r}")
    run = report["run"]
    _check_situations(report, wanted)
    for warning in replay_warnings(outcomes_of(report), whole=run["judged"] == REQUIRED_SET):
        if warning not in report["warnings"]:
            raise VerificationError(f"replays: the report does not warn that {warning}")
    for warning in interruptions.warnings(run["facts"].get("interrupted") or []):
        if warning not in report["warnings"]:
            raise VerificationError(f"interruptions: the report does not warn that {warning}")
    certified = run["judged"] == REQUIRED_SET and is_certificate(
        run["profile"], int(verdict.exit_code), report["source"]["dirty"], run["facts"]
    )
    if certified != report["verdict"]["certified"] or certified != (report["kind"] == "certificate"):
        raise VerificationError(f"kind: the report calls itself a {report['kind']}, which its contents do not bear out")
    from verification.certificate.join import check_shards  # which verifies the shards in turn

    if (wrong := check_shards(folder, report)) is not None:
        raise VerificationError(f"shards: {wrong}")
    return _check_current(rig, report)


def _check_situations(report: dict[str, Any], wanted: required.RequiredSet) -> None:
    """Every situation that the profile expects is listed as its tests reached it, and a missed one is warned about."""
    reached = {name for test in report["tests"] for name, count in test["situations"].items() if count}
    listed = {entry["name"]: entry for entry in report["situations"]}
    expected = wanted.profile(report["run"]["profile"]).situations if report["run"]["judged"] == REQUIRED_SET else ()
    for name in {*expected, *listed}:
        if name not in listed or listed[name]["reached"] != (name in reached):
            raise VerificationError(f"situations: {name} is not listed as the tests of {_REPORT} reached it")
    for warning in missed(report["situations"]):
        if warning not in report["warnings"]:
            raise VerificationError(f"situations: the report does not warn that {warning}")


def _check_current(rig: str, report: dict[str, Any]) -> list[str]:
    """An edited required set or threshold voids what was made with the older one."""
    if rig not in required.known_rigs():
        return [f"rig {rig} is not known to this installation: its required set was not compared"]
    if required.text_digest(required.required_text(rig)) != report["digests"]["required"]:
        raise VerificationError(f"void: the required set of rig {rig} was edited since")
    text = required.thresholds_text()
    if (None if text is None else required.text_digest(text)) != report["digests"]["thresholds"]:
        raise VerificationError("void: the thresholds were edited since")
    return []


def _engine_notes(statement: dict[str, Any]) -> list[str]:
    here = provenance.engine_modules()
    notes = []
    for subject in statement["subject"]:
        if subject["name"].startswith(ENGINE_PREFIX):
            name = subject["name"].removeprefix(ENGINE_PREFIX)
            same = here.get(name) == subject["digest"]["sha256"]
            notes.append(f"engine module {name}: {'the same as' if same else 'not'} the one installed here")
    return notes
