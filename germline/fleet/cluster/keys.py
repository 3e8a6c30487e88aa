"""Certificates of a fleet: one authority, and a key for each machine. Both ends of a connection must show one.

A machine needs three files: ``ca.pem``, by which it recognizes the others, and its own ``cert.pem`` and ``key.pem``.
The key of the authority, ``ca.key``, stays where it was created.
"""

import datetime
import os
from pathlib import Path
from typing import Any

from germline.errors import BadInput

YEARS = 10
FILES = ("ca.pem", "cert.pem", "key.pem")


def create_authority(folder: Path) -> None:
    """Create an authority, with a key for the coordinator in the same folder."""
    crypto = Crypto()
    if (folder / "ca.key").exists():
        raise BadInput(f"{folder} has an authority already: add machines with 'germline keys add {folder} NAME'.")
    folder.mkdir(parents=True, exist_ok=True)
    key, x509 = crypto.create_key(), crypto.x509
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]
    extensions.append((x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False))
    name = "germline fleet"
    write_new(folder / "ca.pem", crypto.create_certificate(name, key, crypto.name(name), key, extensions))
    write_new(folder / "ca.key", crypto.encode_key(key), secret=True)
    issue(folder, folder, "coordinator", server=True)


def add_machine(folder: Path, name: str) -> Path:
    """Create a folder with the files of one more machine; return it."""
    if not (folder / "ca.key").is_file():
        raise BadInput(f"{folder} has no authority: make one with 'germline keys init {folder}'.")
    if not name or name != Path(name).name or name.startswith("."):
        raise BadInput(f"{name!r} cannot be the name of a machine: use letters and digits.")
    machine = folder / name
    if machine.exists():
        raise BadInput(f"{machine} exists already: give the machine another name, or delete it first.")
    machine.mkdir()
    write_new(machine / "ca.pem", (folder / "ca.pem").read_bytes())
    issue(folder, machine, name)
    return machine


def issue(authority: Path, folder: Path, name: str, *, server: bool = False) -> None:
    """Create a key and its certificate, signed by the authority; a worker's does not make it a coordinator."""
    crypto = Crypto()
    key, x509 = crypto.create_key(), crypto.x509
    parent = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    signer = crypto.serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    usages = x509.oid.ExtendedKeyUsageOID
    allowed = [usages.CLIENT_AUTH, *([usages.SERVER_AUTH] if server else [])]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    extensions = [(x509.BasicConstraints(ca=False, path_length=None), True)]
    extensions += [(x509.ExtendedKeyUsage(allowed), False), (identifier, False)]
    write_new(folder / "cert.pem", crypto.create_certificate(name, key, parent.subject, signer, extensions))
    write_new(folder / "key.pem", crypto.encode_key(key), secret=True)


def security_options(folder: Path) -> dict[str, Any]:
    """Return the files of a folder as options of Dask's ``Security``; both ends of a connection show a certificate."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        hint = "make keys with 'germline keys init DIR' and 'keys add DIR NAME'"
        raise BadInput(f"{folder} has no {missing[0]}: {hint}.")
    files = {kind: str((folder / f"{kind}.pem").resolve()) for kind in ("ca", "cert", "key")}
    roles = ("client", "scheduler", "worker")
    options = {f"tls_{role}_{kind}": files[kind] for role in roles for kind in ("cert", "key")}
    return {"tls_ca_file": files["ca"], "require_encryption": True, **options}


def check_server(folder: Path) -> None:
    """Raise an error if the certificate of a folder is one of a worker, to which workers would not connect."""
    x509 = Crypto().x509
    try:
        certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound):  # not made by 'germline keys', or tried when it is used
        return
    if x509.oid.ExtendedKeyUsageOID.SERVER_AUTH not in usages:
        raise BadInput(f"{folder} has the key of a worker: a coordinator needs the folder of 'germline keys init'.")


def write_new(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file; a secret one can be read by its owner alone, from the start."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)


class Crypto:
    """The parts of the library cryptography that are used here."""

    def __init__(self) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise BadInput("Keys need the library cryptography: pip install 'germline[dask]'.") from error
        self.x509, self.hashes, self.serialization, self.ec = x509, hashes, serialization, ec

    def create_key(self) -> Any:
        return self.ec.generate_private_key(self.ec.SECP256R1())

    def encode_key(self, key: Any) -> Any:
        kinds = self.serialization
        return key.private_bytes(kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption())

    def name(self, common: str) -> Any:
        return self.x509.Name([self.x509.NameAttribute(self.x509.oid.NameOID.COMMON_NAME, common)])

    def create_certificate(self, name: str, key: Any, issuer: Any, signer: Any, extensions: list[Any]) -> Any:
        """Return a certificate of a key, as PEM; each extension has whether it is critical."""
        now = datetime.datetime.now(datetime.UTC)
        builder = self.x509.CertificateBuilder().subject_name(self.name(name)).issuer_name(issuer)
        builder = builder.public_key(key.public_key()).serial_number(self.x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        builder = builder.not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(signer, self.hashes.SHA256()).public_bytes(self.serialization.Encoding.PEM)
