"""Certificates for tests of TLS, in files."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme

from ftcomm.control.tls import Files


class Authority:
    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder, self._name = folder, name
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def files(
        self, name: str = "own", *, ca: bool = True, ended: bool = False, early: bool = False, host: str = "ftcomm.test"
    ) -> Files:
        """Of a certificate that it has signed, maybe one whose time is over, or has yet to come."""
        until = datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc) if ended else None
        since = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1) if early else None
        made = self._ca.issue_cert(host, not_before=since, not_after=until)
        cert, key = (self._folder / f"{self._name}-{name}.{what}.pem" for what in ("cert", "key"))
        made.cert_chain_pems[0].write_to_path(str(cert))
        made.private_key_pem.write_to_path(str(key))
        return Files(str(cert), str(key), str(self.file) if ca else "")


def environment(files: Files) -> dict[str, str]:
    cert, key, ca = files
    return {"FTCOMM_TLS_CERT": cert, "FTCOMM_TLS_KEY": key} | ({"FTCOMM_TLS_CA": ca} if ca else {})
