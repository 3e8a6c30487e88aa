"""Certificates of a fleet: an authority of its own, and a key for each machine. Both ends of a connection show one.

A machine needs three files: ``ca.pem``, by which it knows the others, and its own ``cert.pem`` and ``key.pem``. The key
of the authority, ``ca.key``, stays where it was made.
"""

import datetime
import os
import ssl
from pathlib import Path
from typing import Any

from germline.errors import BadInput

YEARS = 10
FILES = ("ca.pem", "cert.pem", "key.pem")


def init(folder: Path) -> None:
    """A new authority, with a key for the coordinator in the same folder."""
    crypto = cryptography()
    if (folder / "ca.key").exists():
        raise BadInput(f"{folder} has an authority already: add machines with 'germline keys add {folder} NAME'.")
    folder.mkdir(parents=True, exist_ok=True)
    key = crypto.ec.generate_private_key(crypto.ec.SECP256R1())
    name = crypto.name("germline fleet")
    usage = crypto.x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    made = crypto.certificate(name, key.public_key()).issuer_name(name)
    made = made.add_extension(crypto.x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(usage, critical=True)
    made = made.add_extension(crypto.x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    write(folder / "ca.pem", crypto.pem(made.sign(key, crypto.hashes.SHA256())))
    write(folder / "ca.key", crypto.private(key), secret=True)
    issue(folder, folder, "coordinator", server=True)


def add(folder: Path, name: str) -> Path:
    """A folder with the files of one more machine."""
    if not (folder / "ca.key").is_file():
        raise BadInput(f"{folder} has no authority: make one with 'germline keys init {folder}'.")
    if not name or name != Path(name).name or name.startswith("."):
        raise BadInput(f"{name!r} is no name of a machine: use letters and digits.")
    made = folder / name
    if made.exists():
        raise BadInput(f"{made} exists already: give the machine another name, or delete it first.")
    made.mkdir()
    write(made / "ca.pem", (folder / "ca.pem").read_bytes())
    issue(folder, made, name)
    return made


def issue(authority: Path, folder: Path, name: str, *, server: bool = False) -> None:
    """A key and its certificate, signed by the authority; that of a worker does not make it a coordinator."""
    crypto = cryptography()
    parent = crypto.x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    signer = crypto.load_key((authority / "ca.key").read_bytes())
    key = crypto.ec.generate_private_key(crypto.ec.SECP256R1())
    usages = crypto.oid.ExtendedKeyUsageOID
    allowed = [usages.CLIENT_AUTH, *([usages.SERVER_AUTH] if server else [])]
    made = crypto.certificate(crypto.name(name), key.public_key()).issuer_name(parent.subject)
    made = made.add_extension(crypto.x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(crypto.x509.ExtendedKeyUsage(allowed), critical=False)
    made = made.add_extension(
        crypto.x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    write(folder / "cert.pem", crypto.pem(made.sign(signer, crypto.hashes.SHA256())))
    write(folder / "key.pem", crypto.private(key), secret=True)


def context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """One end of a connection, which takes only an other end with a certificate of the same authority."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise BadInput(
            f"{folder} has no {missing[0]}: make keys with 'germline keys init DIR' and 'keys add DIR NAME'."
        )
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # machines come from anywhere: the authority's signature is what counts
    made.verify_mode = ssl.CERT_REQUIRED
    try:
        made.load_verify_locations(folder / "ca.pem")
        made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except (ssl.SSLError, OSError) as error:
        raise BadInput(f"The keys in {folder} cannot be used: {error}.") from error
    return made


def write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """A new file; one that is secret can be read by its owner alone, from the start."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)


class cryptography:  # noqa: N801
    """The parts of the library that are used here."""

    def __init__(self) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise BadInput("Keys need the library cryptography: pip install 'germline[elastic]'.") from error
        self.x509, self.oid, self.hashes, self.serialization, self.ec = x509, x509.oid, hashes, serialization, ec

    def name(self, common: str) -> Any:
        return self.x509.Name([self.x509.NameAttribute(self.oid.NameOID.COMMON_NAME, common)])

    def certificate(self, subject: Any, public: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        made = self.x509.CertificateBuilder().subject_name(subject).public_key(public)
        made = made.serial_number(self.x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        return made.not_valid_after(now + datetime.timedelta(days=365 * YEARS))

    def pem(self, certificate: Any) -> bytes:
        found: bytes = certificate.public_bytes(self.serialization.Encoding.PEM)
        return found

    def private(self, key: Any) -> bytes:
        kinds = self.serialization
        found: bytes = key.private_bytes(kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption())
        return found

    def load_key(self, content: bytes) -> Any:
        return self.serialization.load_pem_private_key(content, None)
