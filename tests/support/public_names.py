"""The lab's servers under the names that the documentation has, by HTTPS, as a user's would be.

Headscale itself serves TLS. The mirror of Tailscale's downloads takes the place of Tailscale's own
site, which a lab cannot reach. An authority made for one test, which the nodes trust, signs both.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from lab_command import LabCommand

HEADSCALE, DOWNLOADS = "headscale.example.org", "pkgs.tailscale.com"
CONFIG = "/etc/headscale/config.yaml"
SERVE_DOWNLOADS = """\
import functools, http.server, ssl, sys
sys.path.insert(0, "/opt/lab")
import mirror
site = functools.partial(mirror.Site, directory="/opt/lab/mirror")
server = http.server.ThreadingHTTPServer((sys.argv[1], 443), site)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/etc/lab/names.crt", "/etc/lab/names.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def give_public_names(lab: LabCommand, nodes: Sequence[str], folder: Path) -> Path:
    """Both names then answer by HTTPS on all nodes. Returns the file that the controller trusts."""
    certificate, key, authority = _certificates([HEADSCALE, DOWNLOADS])
    lab.write("control", "/etc/lab/names.crt", certificate + authority)
    lab.write("control", "/etc/lab/names.key", key)
    headscale, downloads = addresses(lab)
    _serve_downloads(lab, downloads)
    _serve_headscale(lab)
    for node in nodes:
        lab.write(node, "/usr/local/share/ca-certificates/lab.crt", authority)
        hosts = f"{headscale} {HEADSCALE}\\n{downloads} {DOWNLOADS}\\n"
        lab.on(node, f"update-ca-certificates >/dev/null 2>&1; printf '{hosts}' >> /etc/hosts")
        for name, path in ((HEADSCALE, "health"), (DOWNLOADS, "stable/?mode=json")):
            lab.wait(node, f"curl -fsS -o /dev/null https://{name}/{path}", 30)
    ca_file = folder / "authority.pem"
    ca_file.write_bytes(authority)
    return ca_file


def addresses(lab: LabCommand) -> tuple[str, str]:
    """Of Headscale, and of the downloads: control has a second one for these."""
    underlay = ipaddress.ip_network(lab.underlay())
    return lab.inventory()["_meta"]["hostvars"]["control"]["ansible_host"], str(underlay[9])


def _serve_downloads(lab: LabCommand, address: str) -> None:
    lab.write("control", "/etc/lab/serve_downloads.py", SERVE_DOWNLOADS.encode())
    unit = "systemd-run --quiet --unit=downloads --property=Restart=on-failure"
    serve = f"{unit} python3 /etc/lab/serve_downloads.py {address}"
    lab.on("control", f"ip address add {address}/24 dev eth0 && {serve}")


def _serve_headscale(lab: LabCommand) -> None:
    headscale, _ = addresses(lab)
    changes = (
        f"s|^server_url: .*|server_url: https://{HEADSCALE}|;"
        f"s|^listen_addr: .*|listen_addr: {headscale}:443|"
    )
    more = "tls_cert_path: /etc/lab/names.crt\\ntls_key_path: /etc/lab/names.key\\n"
    write = f"sed -i '{changes}' {CONFIG} && printf '{more}' >> {CONFIG}"
    lab.on("control", f"{write} && systemctl restart headscale")


def _certificates(names: Sequence[str]) -> tuple[bytes, bytes, bytes]:
    """For the names, its key, and the authority that signed it; all good for a day."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "The lab's authority")])
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    certificate = (
        _builder(own_name, authority_name, key.public_key())
        .add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, names)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        authority.public_bytes(serialization.Encoding.PEM),
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
