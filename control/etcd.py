"""Requests to etcd over its HTTP gateway, by `etcd3gw` (extra `etcd`): where it is, who we are, what its answers mean.

The address is `etcd://HOST:PORT[,HOST:PORT]/PREFIX`; the environment says how to log in:

    FTCOMM_ETCD_CACERT                    a file: speak TLS, and trust what it has certified
    FTCOMM_ETCD_CERT, FTCOMM_ETCD_KEY     files: show this certificate
    FTCOMM_ETCD_USER, FTCOMM_ETCD_PASSWORD
    FTCOMM_ETCD_MAX_REQUEST_BYTES         the value etcd was started with, if not its default
"""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import etcd3gw
import msgspec
import requests
from etcd3gw.exceptions import Etcd3Exception

from ftcomm.control.decode import learn
from ftcomm.control.store import StoreError

SCHEME = "etcd://"
EXAMPLE = f"{SCHEME}etcd:2379/my-job"
ACCESS = {
    "cacert": "FTCOMM_ETCD_CACERT",
    "cert": "FTCOMM_ETCD_CERT",
    "key": "FTCOMM_ETCD_KEY",
    "user": "FTCOMM_ETCD_USER",
    "password": "FTCOMM_ETCD_PASSWORD",
}
LARGEST, REQUEST = "FTCOMM_ETCD_MAX_REQUEST_BYTES", 3 << 19
HOPELESS = {3, 7, 9, 12, 16}  # codes of gRPC that are final: bad arguments, no permission, ...
UNAUTHENTICATED, NOT_FOUND = 16, 5

Json = dict[str, Any]
A = TypeVar("A")


class EtcdAway(Exception):
    """No endpoint has answered that could: try again. The request may have been carried out all the same."""


class EtcdRefused(StoreError):
    """Raised where etcd refuses, however often it is asked."""


@dataclasses.dataclass(frozen=True)
class EtcdPlace:
    """The place of the keys of one job."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    cacert: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    request: int = REQUEST  # bytes of the longest request

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(f'{host}:{port}' for host, port in self.endpoints)}{self.prefix}"

    @classmethod
    def parse(cls, url: str, env: Mapping[str, str]) -> EtcdPlace:
        """Parses an address. Raises `StoreError`, which repeats no password."""
        names, _, prefix = url.removeprefix(SCHEME).partition("/")
        if "@" in names:
            raise StoreError(
                "--store with a user in it, which everybody on this host can read; set FTCOMM_ETCD_USER and "
                "FTCOMM_ETCD_PASSWORD instead"
            )
        endpoints = []
        for name in names.split(","):
            host, _, port = name.rpartition(":")
            if not host.strip("[]") or not port.isdigit() or not 0 < int(port) < 65536:
                raise StoreError(f"--store {url}: expected host:port, not {name!r}, as in {EXAMPLE}")
            endpoints.append((host.strip("[]"), int(port)))
        if not prefix.strip("/"):
            raise StoreError(f"--store {url}: the views of each job need a name of their own there, as in {EXAMPLE}")
        secret = {field: env.get(name, "") for field, name in ACCESS.items()}
        for field in ("cacert", "cert", "key"):
            if secret[field] and not Path(secret[field]).is_file():
                raise StoreError(f"{ACCESS[field]}={secret[field]}: there is no such file")
        for one, other in (("cert", "key"), ("user", "password")):
            if bool(secret[one]) != bool(secret[other]):
                raise StoreError(f"{ACCESS[one]} and {ACCESS[other]}: set both, or none")
        if secret["cert"] and not secret["cacert"]:
            raise StoreError("FTCOMM_ETCD_CERT without FTCOMM_ETCD_CACERT, by which TLS is spoken at all; set it, too")
        away = [host for host, _ in endpoints if not _is_loopback(host)]
        if secret["password"] and not secret["cacert"] and away:
            raise StoreError(
                f"FTCOMM_ETCD_PASSWORD would go to {away[0]} for everybody on the way to read; set FTCOMM_ETCD_CACERT "
                "to a file with the authority that certifies etcd, so that TLS is spoken"
            )
        request = env.get(LARGEST, str(REQUEST))
        if not request.isdigit() or int(request) < REQUEST // 100:
            raise StoreError(
                f"{LARGEST}={request}: expected the --max-request-bytes that etcd runs with, as {REQUEST}, its default"
            )
        return cls(tuple(endpoints), f"/{prefix.strip('/')}", **secret, request=int(request))


class Etcd:
    """The requests. Every call blocks for at most `timeout` seconds per endpoint, and raises `EtcdAway` or
    `EtcdRefused`. For one thread at a time. The endpoint that has answered is asked first the next time."""

    def __init__(self, place: EtcdPlace, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self._clients = [
            etcd3gw.Etcd3Client(
                host=host,
                port=port,
                protocol="https" if place.cacert else "http",
                cert_cert=place.cert or None,
                cert_key=place.key or None,
                timeout=timeout,
                api_path="/v3/",  # etcd 3.4 and later
            )
            for host, port in place.endpoints
        ]
        for client in self._clients:
            client.session.trust_env = False  # views and passwords go to etcd alone, and to no HTTP_PROXY
        self._first = 0
        self._token = ""

    def txn(self, compare: list[Json], success: list[Json], failure: list[Json]) -> Txn:
        return self._ask(Txn, "/kv/txn", {"compare": compare, "success": success, "failure": failure})

    def grant(self, seconds: int) -> tuple[int, int]:
        """Grants a lease. Returns its number and its seconds, which may be more than were asked for."""
        lease = self._ask(Lease, "/lease/grant", {"TTL": seconds, "ID": 0})
        return lease.ID, lease.TTL

    def keep_alive(self, lease: int) -> int:
        """Keeps a lease alive. Returns the seconds that it lasts from now on; 0 if it has ended."""
        return self._ask(Kept, "/lease/keepalive", {"ID": lease}).result.TTL

    def revoke(self, lease: int) -> None:
        """Revokes a lease, which may have ended."""
        self._ask(Kept, "/lease/revoke", {"ID": lease}, absent=Kept())

    def _ask(self, kind: type[A], path: str, body: Json, absent: A | None = None) -> A:
        away = []
        for turn in range(len(self._clients)):
            index = (self._first + turn) % len(self._clients)
            client = self._clients[index]
            where = f"{client.host}:{client.port}"
            try:
                answer = self._authenticated(client, kind, path, body)
            except EndpointFailed as failed:
                if failed.code == NOT_FOUND and absent is not None:
                    answer = absent
                elif failed.code in HOPELESS:
                    raise EtcdRefused(f"etcd at {where} refuses: {failed}") from None
                else:
                    away.append(f"{where}: {failed}")
                    continue
            self._first = index
            return answer
        self._first = (self._first + 1) % len(self._clients)
        raise EtcdAway("; ".join(away))

    def _authenticated(self, client: etcd3gw.Etcd3Client, kind: type[A], path: str, body: Json) -> A:
        if not self.place.user:
            return self._post(client, kind, path, body)
        if self._token:
            try:
                return self._post(client, kind, path, body)
            except EndpointFailed as failed:  # a token ends after some minutes, and with its etcd
                if failed.code != UNAUTHENTICATED:
                    raise
        account = {"name": self.place.user, "password": self.place.password}
        self._token = ""
        self._token = self._post(client, Account, "/auth/authenticate", account).token
        return self._post(client, kind, path, body)

    def _post(self, client: etcd3gw.Etcd3Client, kind: type[A], path: str, body: Json) -> A:
        """Posts to one endpoint. Raises `EndpointFailed`."""
        try:
            headers = {"Authorization": self._token} if self._token else {}
            trusted = self.place.cacert or True  # passed each time, since REQUESTS_CA_BUNDLE overrides a session's
            return answered(kind, client.post(client.get_url(path), json=body, headers=headers, verify=trusted))
        except Etcd3Exception as error:
            raise said(str(error.detail_text)) if error.detail_text else _unheard(str(error)) from None
        except ValueError as error:  # the answer is not JSON; requests raises it as a `RequestException`, too
            raise EndpointFailed(f"its answer is none of etcd's ({error})", 12) from None
        except requests.RequestException as error:
            raise _unheard(str(error)) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class EndpointFailed(Exception):
    """One endpoint has failed."""

    def __init__(self, text: str, code: int = 14) -> None:
        super().__init__(text)
        self.code = code  # a code of gRPC


def said(text: str) -> EndpointFailed:
    """Makes an error from what etcd says, or of something in between."""
    try:
        answer = json.loads(text)
        code = answer.get("code") or answer.get("grpc_code") or 14
        return EndpointFailed(str(answer.get("message") or answer["error"]), int(code))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        if "not found" in text.lower():
            return EndpointFailed("there is no gRPC gateway of etcd, which is part of etcd 3.4 and later", 12)
        return _unheard(text)


_REASONS = (
    (r"timed out", "no answer within its time"),
    (r"CERTIFICATE_VERIFY_FAILED\] [^:]*: ([^(]*[^( ])", "its certificate is not accepted: {}"),
    (r"WRONG_VERSION_NUMBER|record layer failure", "it does not speak TLS; unset FTCOMM_ETCD_CACERT"),
    (r"Errno -?\d+\] ([^'\")]*)", "{}"),
    (
        r"Remote end closed|Connection aborted|BadStatusLine",
        "it closes the connection; if it speaks TLS, set FTCOMM_ETCD_CACERT",
    ),
)


def _unheard(text: str) -> EndpointFailed:
    for pattern, reason in _REASONS:
        found = re.search(pattern, text)
        if found:
            return EndpointFailed(reason.format(*found.groups()))
    return EndpointFailed(text[:300])


# -- the JSON of the gateway: keys and values in base64, numbers as strings, what is 0 left out ---------------------


class Entry(msgspec.Struct, frozen=True):
    key: bytes
    create_revision: int
    mod_revision: int
    value: bytes = b""


class Range(msgspec.Struct, frozen=True):
    kvs: tuple[Entry, ...] = ()


class Response(msgspec.Struct, frozen=True):
    response_range: Range = Range()


class Header(msgspec.Struct, frozen=True):
    revision: int


class Txn(msgspec.Struct, frozen=True):
    header: Header
    succeeded: bool = False
    responses: tuple[Response, ...] = ()

    @property
    def revision(self) -> int:
        """The revision of all keys that the transaction has put."""
        return self.header.revision

    def found(self) -> dict[str, Entry]:
        """The keys that its ranges have found."""
        entries = [entry for response in self.responses for entry in response.response_range.kvs]
        return {entry.key.decode(errors="replace"): entry for entry in entries}


class Lease(msgspec.Struct, frozen=True):
    ID: int = 0
    TTL: int = 0


class Kept(msgspec.Struct, frozen=True):
    result: Lease = Lease()


class Account(msgspec.Struct, frozen=True):
    token: str


learn(Range, Txn, Lease, Kept, Account)


def answered(kind: type[A], answer: object) -> A:
    """Checks an answer. Raises `EndpointFailed`: a stream such as keepalive gives an error as an answer."""
    if isinstance(answer, dict) and "error" in answer:
        raise said(json.dumps(answer["error"]))
    try:
        return msgspec.convert(answer, kind, strict=False)
    except (ValueError, RecursionError) as error:  # a string that is not text is a ValueError as well
        raise EndpointFailed(f"its answer is none of etcd's ({error})", 12) from None


def put(key: str, value: bytes, lease: int = 0) -> Json:
    return {"request_put": {"key": _text(key.encode()), "value": _text(value), "lease": str(lease)}}


def get(key: str) -> Json:
    return {"request_range": {"key": _text(key.encode())}}


def get_names(prefix: str) -> Json:
    """Gets what is below, without values."""
    return {"request_range": {**_below(prefix), "keys_only": True}}


def delete(key: str) -> Json:
    return {"request_delete_range": {"key": _text(key.encode())}}


def delete_all(prefix: str) -> Json:
    return {"request_delete_range": _below(prefix)}


def created(key: str, revision: int) -> Json:
    """Makes a comparison: the key was created at `revision`; 0: it is not there."""
    return {"key": _text(key.encode()), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def modified(key: str, revision: int) -> Json:
    return {"key": _text(key.encode()), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def _below(prefix: str) -> Json:
    return {"key": _text(f"{prefix}/".encode()), "range_end": _text(f"{prefix}0".encode())}  # "0" comes after "/"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
