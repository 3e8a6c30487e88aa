"""Certificates of a fleet: one authority, and a key for each machine. Both ends of a connection must show one.

A machine needs three files: ``ca.pem``, by which it recognizes the others, and its own ``cert.pem`` and ``key.pem``.
The key of the authority, ``ca.key``, stays where it was created.
"""

import datetime
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from germline.errors import BadInput
from germline.fleet.cluster.scheduler_process import REVOKED

AUTHORITY_DAYS, MACHINE_DAYS = 730, 180  # for which certificates are valid
FILES = ("ca.pem", "cert.pem", "key.pem")


def create_authority(folder: Path) -> None:
    """Create an authority, with a key for the coordinator in the same folder."""
    x509 = load_cryptography()[0]
    if (folder / "ca.key").exists():
        raise BadInput(f"{folder} has an authority already: add machines with 'germline keys add {folder} NAME'.")
    make_private(folder)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]
    create_certificate(folder / "ca.pem", folder / "ca.key", "germline fleet", extensions, days=AUTHORITY_DAYS)
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
    make_private(machine)
    write_new(machine / "ca.pem", (folder / "ca.pem").read_bytes())
    issue(folder, machine, name)
    return machine


def keep_private_keys(folder: Path) -> Path:
    """Return a folder with keys for a coordinator, and with those of its workers in ``worker``; made if it is new."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        create_authority(partial)
        add_machine(partial, "worker")
        with suppress(OSError):  # another process was quicker
            partial.rename(folder)  # it appears only once it is complete
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def revoke_machine(folder: Path, name: str) -> None:
    """Add a machine to the list of those that are not let in any more, which running coordinators read."""
    if not (folder / "ca.key").is_file():
        raise BadInput(f"{folder} has no authority, and so no list of revoked names: give the folder of 'keys init'.")
    if not (folder / name / "cert.pem").is_file():
        raise BadInput(f"{folder} has no machine {name!r}: the names are those that were given to 'germline keys add'.")
    with (folder / REVOKED).open("a") as file:
        file.write(f"{name}\n")


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can read, whatever the process's umask is."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def issue(authority: Path, folder: Path, name: str, *, server: bool = False) -> None:
    """Create a key and its certificate, signed by the authority; a worker's does not make it a coordinator."""
    x509 = load_cryptography()[0]
    usages = x509.oid.ExtendedKeyUsageOID
    allowed = [usages.CLIENT_AUTH, *([usages.SERVER_AUTH] if server else [])]
    extensions = [(x509.BasicConstraints(ca=False, path_length=None), True), (x509.ExtendedKeyUsage(allowed), False)]
    create_certificate(folder / "cert.pem", folder / "key.pem", name, extensions, authority, days=MACHINE_DAYS)


def security_options(folder: Path | None) -> dict[str, Any] | None:
    """Return the files of a folder as options of Dask's ``Security``; both ends of a connection show a certificate."""
    if folder is None:
        return None
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        hint = "make keys with 'germline keys init DIR' and 'keys add DIR NAME'"
        raise BadInput(f"{folder} has no {missing[0]}: {hint}.")
    files = {kind: str((folder / f"{kind}.pem").resolve()) for kind in ("ca", "cert", "key")}
    roles = ("client", "scheduler", "worker")
    options = {f"tls_{role}_{kind}": files[kind] for role in roles for kind in ("cert", "key")}
    return {"tls_ca_file": files["ca"], "require_encryption": True, **options}


def check_dates(folder: Path) -> None:
    """Raise an error if a certificate of a folder is not valid any more."""
    x509 = load_cryptography()[0]
    for name in ("ca.pem", "cert.pem"):
        try:
            ends = x509.load_pem_x509_certificate((folder / name).read_bytes()).not_valid_after_utc
        except ValueError:  # no certificate: this is found out when it is used
            continue
        if ends < datetime.datetime.now(datetime.UTC):
            again = "'germline keys init'" if name == "ca.pem" else "'germline keys add'"
            raise BadInput(f"The certificate {folder / name} has expired on {ends:%Y-%m-%d}: make keys with {again}.")


def check_server(folder: Path) -> None:
    """Raise an error if the certificate of a folder is one of a worker, to which workers would not connect."""
    x509 = load_cryptography()[0]
    try:
        certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound):  # not made by 'germline keys', or tried when it is used
        return
    if x509.oid.ExtendedKeyUsageOID.SERVER_AUTH not in usages:
        raise BadInput(f"{folder} has the key of a worker: a coordinator needs the folder of 'germline keys init'.")


def write_new(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, from the start."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def load_cryptography() -> tuple[Any, Any, Any, Any]:
    """Return the parts of the library cryptography that are used here, which is an optional dependency."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BadInput("Keys need the library cryptography: pip install 'germline[dask]'.") from error
    return x509, hashes, serialization, ec


def create_certificate(
    file: Path,
    key_file: Path,
    name: str,
    extensions: list[tuple[Any, bool]],
    authority: Path | None = None,
    *,
    days: int,
) -> None:
    """Write a new key and its certificate, signed by an authority, or self-signed.

    Args:
        file: The file of the certificate.
        key_file: The file of the key.
        name: The name of the machine, or of a new authority.
        extensions: Extensions of the certificate, each with whether it is critical.
        authority: The folder of the authority that signs it; a new authority signs for itself.
        days: For how long the certificate is valid.
    """
    x509, hashes, serialization, ec = load_cryptography()
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    issuer, signer = subject, key
    if authority is not None:
        issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes()).subject
        signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuing = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    for extension, is_critical in [*extensions, (own, False), (issuing, False)]:
        builder = builder.add_extension(extension, critical=is_critical)
    write_new(file, builder.sign(signer, hashes.SHA256()).public_bytes(pem))
    write_new(key_file, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
