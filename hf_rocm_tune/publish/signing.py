"""Signatures of published results, by OpenSSF Model Signing (the package ``model-signing``, the extra ``sign``).

A signature is a file ``model.sig`` over the SHA-256 of every other file of a repository, made with a private key of
an elliptic curve; its format is the library's, so that ``model_signing verify key`` checks it as well.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from getpass import getpass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_rocm_tune.errors import CorruptionError, UsageError, first_line, listed
from hf_rocm_tune.foreign import read_bytes

SIGNATURE_NAME = "model.sig"
_NEW_KEY = "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem`"
_PUBLIC = "`openssl ec -in key.pem -pubout -out public.pem`"


def check_library() -> None:
    """A ``UsageError`` without the library that signs and checks."""
    try:
        import model_signing.signing  # noqa: F401
    except ImportError as error:
        raise UsageError(f"signatures need model-signing ({error}): `pip install model-signing pyopenssl`") from error


def signer(key: Path) -> Any:
    """The library's configuration for signing with a private key in PEM; a passphrase is asked for at a terminal.

    Raises:
        UsageError: the library is missing, or the file is no private key of P-256, P-384 or P-521.
    """
    check_library()
    from model_signing import signing

    _read_key(key, "--sign", f"a private key: {_NEW_KEY}")
    config = signing.Config()
    try:
        try:
            return config.use_elliptic_key_signer(private_key=key)
        except TypeError:  # it is encrypted
            if not os.isatty(0):
                raise UsageError(f"--sign {key}: it has a passphrase, which can be given at a terminal only") from None
            secret: Any = getpass(f"passphrase of {key}: ").encode()
            return config.use_elliptic_key_signer(private_key=key, password=secret)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--sign {key}: it cannot be used as a private key ({first_line(error)}): make one with {_NEW_KEY}"
        ) from error


def sign(files: Mapping[str, bytes | Path], hashes: Mapping[str, str], config: Any, name: str) -> bytes:
    """A signature of files, by their paths in the repository.

    Args:
        files: their contents, or where they lie.
        hashes: their SHA-256; a ``CorruptionError`` where the library has read other bytes.
        config: of `signer`.
        name: of the model, in the signature.
    """
    with _laid_out(files, name) as directory:
        target = directory.parent / SIGNATURE_NAME
        config.set_hashing_config(_hashing()).sign(directory, target)
        content = target.read_bytes()
    payload = json.loads(base64.b64decode(json.loads(content)["dsseEnvelope"]["payload"]))
    signed = {row["name"]: row["digest"] for row in payload["predicate"]["resources"]}
    for path in sorted(hashes.keys() | signed.keys()):
        if hashes.get(path) != signed.get(path):
            raise CorruptionError(f"{path} has changed since it was checked: nothing is published")
    return content


def _hashing() -> Any:
    """SHA-256 of each file but the signature, through links: the Hub's cache is made of them."""
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=[SIGNATURE_NAME]).set_allow_symlinks(True)


@contextmanager
def _laid_out(files: Mapping[str, bytes | Path], name: str) -> Iterator[Path]:
    """A directory with the files, large ones as links."""
    with TemporaryDirectory(prefix="hf-rocm-tune-") as room:
        directory = Path(room) / "signed" / (name.rpartition("/")[2] or "model")
        for path, content in files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                file.symlink_to(content.absolute())
        yield directory


def problem_of(directory: Path, key: Path) -> str | None:
    """What is wrong with a directory's signature, in words; None if it was made with that key's other half over
    exactly these files.

    Raises:
        UsageError: the library is missing, or ``key`` is no public key.
    """
    check_library()
    from model_signing import verifying

    _read_key(key, "--key", f"the public key of who signed: {_PUBLIC}")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=key)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--key {key}: it cannot be used as a public key ({first_line(error)}): give the one of who signed, made "
            f"with {_PUBLIC}"
        ) from error
    file = directory / SIGNATURE_NAME
    try:
        read_bytes(file)
        if any(path.is_symlink() for path in directory.rglob("*")):
            config.set_hashing_config(_hashing())  # the one of the signature would refuse the links (model-signing 1.1)
        config.verify(directory, file)
    except FileNotFoundError:
        return f"it has no signature ({SIGNATURE_NAME})"
    except Exception as error:  # a foreign file in the library's hands: whatever it raises, it did not pass
        message = " ".join(str(error).split()) or type(error).__name__
        if message.startswith("Key mismatch"):
            return "it was signed with another key"
        if type(error).__name__ == "InvalidSignature":  # of cryptography; without a text
            return f"its signature ({SIGNATURE_NAME}) was changed, or was not made with this key"
        return f"its signature does not hold: {_in_words(message)}"
    return None


def _in_words(message: str) -> str:
    """The library's list of differences without its hashes in bytes."""
    differences = []
    for name in re.findall(r"Hash mismatch for \\*'([^'\\]+)", message):
        differences.append(f"{name} is not what was signed")
    for kind, names in re.findall(r"(Extra|Missing) files (?:found )?in model[^:]*: ([^'\"\]]+)", message):
        what = "not signed" if kind == "Extra" else "missing"
        differences.append(f"{names} {what}")
    return listed(differences) if differences else message


def _read_key(key: Path, flag: str, advice: str) -> None:
    try:
        read_bytes(key)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag} {key}: it cannot be read ({why}): give {advice}") from error
