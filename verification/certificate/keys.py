"""Ed25519 keys that sign reports, and the public keys that a verifier trusts."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blink_core.model_store import blink_home

KEY_VARIABLE = "BLINK_SIGNING_KEY"
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


class KeyFileError(ValueError):
    """A key that cannot be read, is of the wrong kind, or is open to others."""


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of the key's SubjectPublicKeyInfo (DER), hex."""
    return hashlib.sha256(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def public_pem(key: Ed25519PublicKey) -> str:
    """The public key as PEM text."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def load_private(path: Path) -> Ed25519PrivateKey:
    """Read an unencrypted PKCS#8 PEM private key; it must be Ed25519 and readable by its owner only."""
    try:
        mode = path.stat().st_mode & 0o777
        data = path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"signing key {path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise KeyFileError(f"signing key {path} has mode {mode:04o}; others can read it: it must be 0600")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"signing key {path} is not an unencrypted PEM private key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"signing key {path} is {type(key).__name__}; it must be Ed25519")
    return key


def create_private(path: Path) -> Ed25519PrivateKey:
    """Make a key with its public half beside it (`.pub`); an existing file is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # Written whole under another name and linked: a second run at the same moment sees the key or no key, never half.
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(text)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()
    path.with_suffix(".pub").write_text(public_pem(key.public_key()), encoding="ascii")
    return key


def signing_key(path: Path | None = None) -> Ed25519PrivateKey:
    """The key to sign with: `path`, or $BLINK_SIGNING_KEY, or this user's own key, made on first use."""
    if path is not None:
        return load_private(path)
    if configured := os.environ.get(KEY_VARIABLE):
        return load_private(Path(configured))
    own = blink_home() / "keys" / "signing-key.pem"
    if not own.exists():
        try:
            return create_private(own)
        except FileExistsError:
            pass
    return load_private(own)


def load_trusted(path: Path) -> list[Ed25519PublicKey]:
    """Public keys of a PEM file, which may hold several, or of all *.pem and *.pub files of a folder."""
    try:
        files = sorted([*path.glob("*.pem"), *path.glob("*.pub")]) if path.is_dir() else [path]
        blocks = [(file, block) for file in files for block in _PEM.findall(file.read_bytes())]
    except OSError as error:
        raise KeyFileError(f"trusted keys {path}: {error.strerror or error}") from error
    keys = []
    for file, block in blocks:
        try:
            key = serialization.load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeyFileError(f"trusted key in {file}: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise KeyFileError(f"trusted key in {file} is {type(key).__name__}; it must be Ed25519")
        keys.append(key)
    if not keys:
        raise KeyFileError(f"trusted keys {path}: no PEM public key in it")
    return keys
