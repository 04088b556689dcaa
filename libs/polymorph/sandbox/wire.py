"""Messages to and from a sandbox: a length, a JSON object, and file descriptors. Never pickle."""

import array
import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<I")
MAX_MESSAGE = 1 << 20
_MAX_FDS = 64


class Closed(ConnectionError):
    """The other side is gone."""


class BadMessage(ValueError):
    """What came is no message of ours."""


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Sends one message with its descriptors.

    Raises:
        Closed: nobody listens.
        BadMessage: it is too long.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE or len(fds) > _MAX_FDS:
        raise BadMessage(
            f"{len(body)} bytes and {len(fds)} descriptors: at most {MAX_MESSAGE} and {_MAX_FDS}"
        )
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    data = _HEADER.pack(len(body)) + body
    try:
        sent = sock.sendmsg([data], ancillary)
        if sent < len(data):
            sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other side is gone") from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors. A socket's time-out passes through as TimeoutError.

    Raises:
        Closed: the other side is gone.
        BadMessage: it is too long or no JSON object.
    """
    head, fds = _head(sock)
    (length,) = _HEADER.unpack(head)
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes: at most {MAX_MESSAGE}")
    try:
        message = json.loads(_exactly(sock, length))
    except ValueError as error:
        raise BadMessage("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise BadMessage(f"a message that is a {type(message).__name__}: an object is wanted")
    return message, fds


def _head(sock: socket.socket) -> tuple[bytes, list[int]]:
    fds: array.array[int] = array.array("i")
    try:
        data, ancillary, _, _ = sock.recvmsg(_HEADER.size, socket.CMSG_LEN(_MAX_FDS * fds.itemsize))
    except ConnectionResetError as error:
        raise Closed("the other side is gone") from error
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        raise Closed("the other side is gone")
    return data + _exactly(sock, _HEADER.size - len(data)), list(fds)


def _exactly(sock: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        try:
            part = sock.recv(length)
        except ConnectionResetError as error:
            raise Closed("the other side is gone") from error
        if not part:
            raise Closed("the other side is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
