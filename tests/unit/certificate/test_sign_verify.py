"""Signature and offline verification: what was signed verifies, and no byte of it can be changed."""

from __future__ import annotations

import base64
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.unit.certificate.conftest import MakeReport
from verification.certificate import keys, output, required, sign
from verification.certificate.records import TestRecord
from verification.certificate.verify import verify

FILES = ("report.json", "report.html", "junit.xml", "required.yaml", "thresholds.yaml", "allure-results/a-result.json")


def resign(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Sign a changed statement with the user's own key, as a forger who owns a key could."""
    envelope = json.loads((folder / sign.ENVELOPE).read_bytes())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    change(statement)
    (folder / sign.ENVELOPE).write_bytes(sign.envelope(sign.canonical(statement), keys.signing_key()))


def test_pre_authentication_encoding_is_that_of_dsse() -> None:
    """Catches: a signature that no other DSSE tool can check (the example is the one of the DSSE specification)."""
    encoded = sign.pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_signed_run_verifies_with_and_without_trust(run_folder: Path) -> None:
    """Catches: a verification that fails on good input, or that says "trusted" when nobody is."""
    alone = verify(run_folder)
    assert (alone.valid, alone.trusted, alone.verdict, alone.kind) == (True, False, "passed", "report")
    assert "integrity only" in alone.summary
    trusted = verify(run_folder / sign.ENVELOPE, [keys.signing_key().public_key()])
    assert (trusted.valid, trusted.trusted) == (True, True)


def test_statement_is_in_toto_with_the_standard_predicate(run_folder: Path, records: list[TestRecord]) -> None:
    """Catches: an attestation that policy engines cannot read."""
    envelope = json.loads((run_folder / sign.ENVELOPE).read_bytes())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["predicate"]["result"] == "WARNED"  # passed, and the expected situations were not reached
    assert statement["predicate"]["passedTests"] == [record.id for record in records]
    names = {subject["name"] for subject in statement["subject"]}
    assert set(FILES) <= names
    configured = {entry["name"] for entry in statement["predicate"]["configuration"]}
    assert {"required.yaml", "model:tiny"} <= configured


@pytest.mark.parametrize("name", FILES)
def test_any_changed_file_is_found(run_folder: Path, name: str) -> None:
    """Catches: a file of the run that can be edited after signing; first, middle and last byte, one bit each."""
    path = run_folder / name
    original = path.read_bytes()
    for position in (0, len(original) // 2, len(original) - 1):
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(changed)
        result = verify(run_folder)
        assert not result.valid
        assert name in result.problems[0]
    path.write_bytes(original)
    assert verify(run_folder).valid


def test_every_byte_of_the_envelope_matters(run_folder: Path) -> None:
    """Catches: white space, padding bits or a key id that can be changed without breaking the signature."""
    path = run_folder / sign.ENVELOPE
    original = path.read_bytes()
    ends = [*range(200), *range(len(original) - 400, len(original))]
    for position in [*ends, *range(200, len(original) - 400, max(1, len(original) // 50))]:
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert not verify(run_folder).valid, f"byte {position} of {len(original)}"


def test_deeply_nested_json_is_a_problem_not_a_crash(run_folder: Path) -> None:
    """Catches: a verifier that an envelope of brackets ends with a traceback."""
    (run_folder / sign.ENVELOPE).write_bytes(b"[" * 100_000)
    assert "envelope" in verify(run_folder).problems[0]


def test_absent_and_added_files_are_found(run_folder: Path) -> None:
    """Catches: evidence removed or slipped in afterwards."""
    (run_folder / "junit.xml").rename(run_folder / "other.xml")
    assert "junit.xml was signed and is absent" in verify(run_folder).problems[0]
    shutil.copy(run_folder / "other.xml", run_folder / "junit.xml")
    assert "other.xml is here and was not signed" in verify(run_folder).problems[0]


def test_untrusted_signer_is_refused(run_folder: Path) -> None:
    """Catches: a forger's own key accepted because his signature is correct."""
    result = verify(run_folder, [Ed25519PrivateKey.generate().public_key()])
    assert not result.valid
    assert "not trusted" in result.problems[0]


def test_statement_that_differs_from_the_report_is_refused(run_folder: Path) -> None:
    """Catches: a signer whose statement says passed where the report's tests do not."""

    def claim_certificate(statement: dict[str, Any]) -> None:
        statement["predicate"][sign.EXTENSION]["kind"] = "certificate"

    resign(run_folder, claim_certificate)
    assert "its kind is not that of report.json" in verify(run_folder).problems[0]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda report: report["tests"][0].update(outcome="product_failure"), "counts"),
        (lambda report: report["tests"].pop(), "counts"),
        (lambda report: report["verdict"].update(certified=True), "kind"),
        (lambda report: report["digests"].update(required="0" * 64), "required.yaml"),
        (lambda report: report.pop("machine"), "schema"),
    ],
)
def test_verdict_is_recomputed_from_the_tests(
    run_folder: Path, edit: Callable[[dict[str, Any]], None], problem: str
) -> None:
    """Catches: a report whose verdict its own tests do not give, signed by the one who edited it."""
    report = json.loads((run_folder / output.REPORT).read_text(encoding="utf-8"))
    edit(report)
    (run_folder / output.REPORT).write_text(json.dumps(report), encoding="utf-8")
    complete = {"machine": {}} | report
    sign.sign(run_folder, complete, keys.signing_key())
    result = verify(run_folder)
    assert not result.valid
    assert problem in result.problems[0]


def test_a_failed_test_counted_as_failed_still_needs_the_right_verdict(run_folder: Path) -> None:
    """Catches: counts that were adjusted together with the outcome, with the verdict left at passed."""
    report = json.loads((run_folder / output.REPORT).read_text(encoding="utf-8"))
    report["tests"][0]["outcome"] = "product_failure"
    report["counts"] |= {"passed": len(report["tests"]) - 1, "product_failure": 1}
    (run_folder / output.REPORT).write_text(json.dumps(report), encoding="utf-8")
    sign.sign(run_folder, report, keys.signing_key())
    assert "its tests give 'property failed'" in verify(run_folder).problems[0]


def test_interruption_that_is_not_warned_of_is_found(
    run_folder: Path, make_report: MakeReport, records: list[TestRecord]
) -> None:
    """Catches: a test that was begun three times, in a report that says nothing of it to whoever reads its warnings."""
    told = [{"test": records[0].id, "times": 2, "reasons": ["the session died"]}]
    report = make_report(records, facts={"interrupted": told})
    output.finish(run_folder, report, required.required_text("local"), required.thresholds_text())
    assert verify(run_folder).problems == ()
    report["warnings"] = [line for line in report["warnings"] if "was interrupted" not in line]
    (run_folder / output.REPORT).write_text(json.dumps(report), encoding="utf-8")
    sign.sign(run_folder, report, keys.signing_key())
    (problem,) = verify(run_folder).problems
    assert f"does not warn that test {records[0].id} was interrupted 2 times" in problem


@pytest.mark.parametrize("name", ["required_text", "thresholds_text"])
def test_edited_thresholds_and_required_sets_void(run_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Catches: an old certificate that survives a loosened threshold."""
    real = getattr(required, name)
    monkeypatch.setattr(required, name, lambda *args: (real(*args) or "") + "# edited\n")
    result = verify(run_folder)
    assert not result.valid
    assert "void" in result.problems[0]


def test_no_envelope_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Catches: a folder without a signature that is taken for a bad one, or for a good one."""
    with pytest.raises(FileNotFoundError, match="holds no attestation"):
        verify(tmp_path)


def test_own_key_is_made_once_and_private(own_home: Path) -> None:
    """Catches: a signing key that others can read, or that changes from run to run."""
    first, second = keys.signing_key(), keys.signing_key()
    assert keys.key_id(first.public_key()) == keys.key_id(second.public_key())
    path = own_home / "keys" / "signing-key.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (trusted,) = keys.load_trusted(path.with_suffix(".pub"))
    assert keys.key_id(trusted) == keys.key_id(first.public_key())


def test_keys_that_cannot_sign_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: signing with a key that others can read, or of another kind, or silently with the default one."""
    path = tmp_path / "key.pem"
    keys.create_private(path)
    monkeypatch.setenv(keys.KEY_VARIABLE, str(path))
    assert keys.key_id(keys.signing_key().public_key()) == keys.key_id(keys.load_private(path).public_key())
    path.chmod(0o644)
    with pytest.raises(keys.KeyFileError, match="0644.*must be 0600"):
        keys.signing_key()
    monkeypatch.setenv(keys.KEY_VARIABLE, str(tmp_path / "absent.pem"))
    with pytest.raises(keys.KeyFileError, match="absent.pem"):
        keys.signing_key()
    other = tmp_path / "other.pem"
    other.write_bytes(
        X25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    other.chmod(0o600)
    with pytest.raises(keys.KeyFileError, match="must be Ed25519"):
        keys.load_private(other)


def test_trust_file_may_hold_several_keys(tmp_path: Path) -> None:
    """Catches: only the first key of a trust file being read."""
    publics = [Ed25519PrivateKey.generate().public_key() for _ in range(3)]
    path = tmp_path / "trust.pem"
    path.write_text("# our keys\n" + "".join(map(keys.public_pem, publics)), encoding="ascii")
    assert [keys.key_id(key) for key in keys.load_trusted(path)] == [keys.key_id(key) for key in publics]
    (tmp_path / "empty.pem").write_text("", encoding="ascii")
    with pytest.raises(keys.KeyFileError, match="no PEM public key"):
        keys.load_trusted(tmp_path / "empty.pem")


def test_allure_results_get_own_ids(run_folder: Path) -> None:
    """Catches: an allure history that starts anew when a test file is moved."""
    result = json.loads((run_folder / "allure-results" / "a-result.json").read_text(encoding="utf-8"))
    assert result["historyId"] != "x"
    assert len(result["historyId"]) == len(result["testCaseId"]) == 32
    assert {"name": "blink_outcome", "value": "passed"} in result["labels"]


def test_output_folder_with_foreign_files_is_refused(tmp_path: Path, run_folder: Path) -> None:
    """Catches: `--out .` that removes somebody's files."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x", encoding="utf-8")
    with pytest.raises(output.OutputError, match=r"chapter1\.tex"):
        output.prepare(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    output.prepare(run_folder)
    assert list(run_folder.iterdir()) == []


def test_record_survives_its_journey() -> None:
    """Catches: a field lost between the worker that ran a test and the report."""
    from verification.certificate.outcomes import Outcome

    record = TestRecord("a/b", "n", "a", Outcome.UNKNOWN, 1.5, "setup", "m", "d", "c", {"w": 1}, cases=3, seed=9)
    assert TestRecord.from_json(record.to_json()) == record
