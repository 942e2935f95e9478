"""Where snapshot servers are found on a host, and how connections between hosts are made.

The memory of a run has the path `host://DURABLE_ROOT@TOKEN`, with the root as the leading rank has spelled it once. Its
sockets are `RUNTIME/ID_OF_ROOT/TOKEN/RANK`, below a folder that only this user can open. Other runs spell the root as
they like, and look for the token. A socket appears by a rename when it already listens, so what refuses connections is
dead, and who finds it removes it.

Between hosts there is plain TCP, where both sides prove that they know the secret of the run: each sends a challenge
and answers the other's with an HMAC of both. From both challenges follow the keys that sign all frames, so that a frame
which was damaged, or is not from the other side, is refused in words. What follows a frame as raw bytes is not signed;
who receives it compares checksums. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import os
import posixpath
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.outside import HOST_VARIABLE, OUTSIDE, Outside
from ..core.processes.framing import Channel, FrameSignatures
from ..core.sockets import Socket
from ..core.storage.locate import MEMORY, MEMORY_FOLDER, memory_folder

logger = logging.getLogger("ckpt_component.storage")

_PATH = re.compile(rf"{MEMORY}(.*)@([\w.-]+)(?:/.*)?", re.S)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PAUSE_SECONDS, _LOCK_SECONDS = 0.02, 10.0
#: How often to make a folder that others remove because it is empty.
_TRIALS = 10


def memory_root(durable_root: str, token: str) -> str:
    """The path of the memory of a run.

    Args:
        durable_root: absolute path, or URL, of its checkpoints
        token: of the run
    """
    return f"{MEMORY}{_plain(durable_root)}@{token}"


def token_of(path: str) -> str:
    """The token of the run of a memory root, or of a path below it; empty: it is not such a path."""
    match = _PATH.fullmatch(path)
    return "" if match is None else match[2]


def tokens_at(durable_root: str, outside: Outside = OUTSIDE) -> list[str]:
    """The tokens of the runs that have servers on this host, or had, and spelled their durable root like this.

    Raises as `runtime_folder`.
    """
    return _names(os.path.join(runtime_folder(outside), _id_of(_plain(durable_root))))


def roots_here(outside: Outside = OUTSIDE) -> list[tuple[str, str]]:
    """The durable roots, by ID, and tokens of all runs of this user that have servers here, or had.

    Raises as `runtime_folder`.
    """
    runtime = runtime_folder(outside)
    return [(root, token) for root in _names(runtime) for token in _names(os.path.join(runtime, root))]


def runtime_folder(outside: Outside = OUTSIDE) -> str:
    """The folder of all sockets of this host, which need not exist yet; see `host_name` for a machine that is several.

    Args:
        outside: of this process

    Raises:
        PermissionError: it is another user's, or open to others
        OSError: it is not an absolute path
    """
    path, part = _safe_folder(outside), outside.environment.get(HOST_VARIABLE, "")
    if "/" in part or part in (".", ".."):
        raise OSError(errno.EINVAL, f"{HOST_VARIABLE} is not the name of a host; set it to one, or unset it", part)
    return os.path.join(path, part) if part else path


def _safe_folder(outside: Outside) -> str:
    """The folder that nobody else can open, and its check; see `runtime_folder`."""
    path = memory_folder(outside)
    if not os.path.isabs(path):
        raise OSError(errno.EINVAL, f"{MEMORY_FOLDER} is not an absolute path; set it to one, or unset it", path)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise _refused(path, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(path, "it is not a folder")
    if status.st_uid != os.getuid():
        raise _refused(path, f"it belongs to user {status.st_uid}, not to user {os.getuid()}")
    if status.st_mode & 0o077:
        raise _refused(path, f"others may open it (its mode is {stat.S_IMODE(status.st_mode):o}, not 700)")
    return path


@dataclass(frozen=True)
class SocketPlace:
    """Where the sockets of one run are.

    Attributes:
        root: ID of its durable root
        token: the run's token
        outside: of this process
    """

    root: str
    token: str
    outside: Outside = field(default=OUTSIDE, compare=False, repr=False)

    @classmethod
    def of(cls, path: str, outside: Outside = OUTSIDE) -> SocketPlace:
        """That of the run of a memory root, or of a path below it; raises ValueError if it is not such a path."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(f"{path!r} is not the path of a run's memory, such as host://runs/one@1f2e3d4c-0a0b0c0d.")
        return cls(_id_of(match[1]), match[2], outside)

    @property
    def folder(self) -> str:
        """The folder; raises as `runtime_folder`."""
        return os.path.join(runtime_folder(self.outside), self.root, self.token)

    def ranks(self) -> dict[int, int]:
        """The ranks that have a socket, each with a number that tells the socket from a later one."""
        folder, found = self.folder, dict[int, int]()
        for name in _names(folder):
            with contextlib.suppress(FileNotFoundError):
                if name.isdecimal():
                    found[int(name)] = os.stat(os.path.join(folder, name)).st_ino
        return found

    def connect(self, rank: int, seconds: float) -> Socket | None:
        """Connect to a server; None: there is none any more.

        Args:
            rank: its rank
            seconds: how long it may take

        Raises:
            TimeoutError: so many connections wait that the server must have been stopped
            OSError: the socket cannot be used
        """
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(ConnectionRefusedError), self._opened() as folder:
                return self._connected(folder, rank, seconds)
            self._remove_dead(rank)
        return None

    def listen(self, rank: int) -> tuple[Socket, int]:
        """Listen on a rank's socket, which replaces that of a predecessor.

        Returns:
            What listens, and the socket's number, as `ranks` has it.

        Raises:
            PermissionError: as `runtime_folder`
            OSError: the socket cannot be made
        """
        runtime = _safe_folder(self.outside)
        try:
            for _ in range(_TRIALS):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed the empty folder
                    return self._listen(rank, runtime)
            return self._listen(rank, runtime)
        except TimeoutError:
            raise
        except OSError as error:
            raise _refused(runtime, error) from error

    def _listen(self, rank: int, runtime: str) -> tuple[Socket, int]:
        os.makedirs(runtime, mode=0o700, exist_ok=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        draft = f".new-{self.outside.pid()}-{rank}"
        with self._opened(locked=True) as folder:
            with contextlib.suppress(FileNotFoundError):  # of a dead process with this number
                os.unlink(draft, dir_fd=folder)
            listener = self.outside.listen(_address(folder, draft))
            try:
                os.rename(draft, str(rank), src_dir_fd=folder, dst_dir_fd=folder)
                return listener, os.stat(str(rank), dir_fd=folder).st_ino
            except BaseException:
                listener.close()
                raise

    def remove(self, rank: int, number: int) -> None:
        """Remove a rank's socket, if it still has this number, and the folders that are then empty."""
        with contextlib.suppress(FileNotFoundError), self._opened(locked=True) as folder:
            if os.stat(str(rank), dir_fd=folder).st_ino == number:
                os.unlink(str(rank), dir_fd=folder)
        self._remove_empty()

    @contextlib.contextmanager
    def _opened(self, *, locked: bool = False) -> Iterator[int]:
        """The folder; locked, so that only this process puts a socket into it. For some system calls."""
        folder = os.open(self.folder, _FOLDER)
        try:
            if locked:
                self._lock(folder)
            yield folder
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)  # a fork may have the descriptor, too
            os.close(folder)

    def _remove_empty(self) -> None:
        try:
            for path in (self.folder, os.path.dirname(self.folder)):
                os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                logger.warning("the empty folder %s could not be removed: %s", error.filename, error)

    def _connected(self, folder: int, rank: int, seconds: float) -> Socket:
        try:
            return self.outside.connect(_address(folder, str(rank)), seconds)
        except TimeoutError as error:  # as many connections wait as may
            raise TimeoutError(errno.ETIMEDOUT, f"rank {rank}'s snapshot server takes no connection") from error

    def _remove_dead(self, rank: int) -> None:
        """Remove a socket on which no process listens, unless another one has taken its place."""
        with contextlib.suppress(FileNotFoundError), self._opened(locked=True) as folder:
            try:
                self._connected(folder, rank, 1.0).close()
            except ConnectionRefusedError:
                os.unlink(str(rank), dir_fd=folder)
                logger.info("removed the socket of rank %d's snapshot server, which is dead", rank)
        self._remove_empty()

    def _lock(self, folder: int) -> None:
        """Lock the folder, which another process has locked for long only if it is stopped."""
        until = self.outside.now() + _LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if self.outside.now() > until:
                    raise TimeoutError(errno.ETIMEDOUT, "another process locks the folder of the sockets") from error
            self.outside.sleep(_PAUSE_SECONDS)


def _address(folder: int, name: str) -> str:
    """The address of a socket, which may have 107 bytes, for a path of any length."""
    return f"/proc/self/fd/{folder}/{name}"


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _plain(durable_root: str) -> str:
    """A durable root as a part of a path, for which `//` is `/`."""
    return posixpath.normpath(f"/{durable_root}").strip("/")


def _id_of(plain: str) -> str:
    return hashlib.sha256(os.fsencode(plain)).hexdigest()[:16]


def _refused(path: str, why: str | OSError) -> OSError:
    number, reason = (errno.EACCES, why) if isinstance(why, str) else (why.errno or errno.EIO, why.strerror or why)
    text = (
        f"{path} cannot have the sockets of snapshots in memory: {reason}; set {MEMORY_FOLDER} to a folder of your own"
    )
    return OSError(number, text)


#: Of what is asked and answered. A server of an earlier version is read, as what a restore asks was the same then.
VERSION = 2
#: What a server says first, with its version.
_HELLO = b"ckpt keeper %d\n"
_HELLO_BYTES = len(_HELLO % VERSION)
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
#: How long the parts of a frame, or of the bytes that follow it, may be on their way.
PATIENCE_SECONDS = 10.0


class PeerAddress(NamedTuple):
    """Where a server is reached from other hosts; also as a list in JSON.

    Attributes:
        host: the name of its host
        address: an IP address or a name that other hosts resolve
        port: of TCP
        rank: whose server it is
    """

    host: str
    address: str
    port: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}'s snapshot server on {self.host} ({self.address} port {self.port})"


def connect_to_peer(to: PeerAddress, secret: str, seconds: float, outside: Outside = OUTSIDE) -> Channel:
    """Connect to a server on another host.

    Args:
        to: where it is
        secret: of its run
        seconds: how long it may take
        outside: of this process

    Returns:
        A connection whose frames are signed.

    Raises:
        ConnectionError: there is no server, or it has hung up
        PermissionError: it belongs to another run, or is not a server
        TimeoutError: it does not answer
        OSError: the host is not reached, or the server is of a newer release
    """
    until = outside.now() + seconds
    try:
        sock = outside.connect((to.address, to.port), seconds)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{to} cannot be reached in {seconds:g} s") from error
    except OSError as error:
        kind = type(error) if isinstance(error, ConnectionError) else ConnectionRefusedError
        raise kind(error.errno or errno.EHOSTUNREACH, f"{to} cannot be reached: {error.strerror or error}") from error
    try:
        outside.watch_host(sock, PATIENCE_SECONDS)
        theirs = _exactly(sock, _HELLO_BYTES + _NONCE_BYTES, until, outside)
        hello = re.fullmatch(_HELLO.replace(b"%d", rb"(\d)"), theirs[:_HELLO_BYTES])
        if hello is None:
            raise PermissionError(errno.EACCES, f"{to} is no snapshot server of a release that this one knows")
        refuse_newer(int(hello[1]), str(to))
        challenges = theirs[_HELLO_BYTES:] + outside.random_bytes(_NONCE_BYTES)
        sock.sendall(challenges[_NONCE_BYTES:] + _derived(secret, b"proof of client", challenges))
        proof = _exactly(sock, _PROOF_BYTES, until, outside)
        if not hmac.compare_digest(proof, _derived(secret, b"proof of keeper", challenges)):
            raise PermissionError(errno.EACCES, f"{to} belongs to another run: the run's secret is not the same")
        return _signed(sock, secret, challenges, (b"client", b"keeper"), str(to), outside)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(errno.ETIMEDOUT, f"{to} has not answered for {seconds:g} s") from error
        if isinstance(error, ConnectionError):
            raise ConnectionResetError(errno.ECONNRESET, f"{to} has hung up") from error
        raise


def refuse_newer(version: int, name: str) -> None:
    """Raise OSError if a server, called `name`, is of a newer version than this release reads."""
    if version > VERSION:
        raise OSError(
            errno.EPROTO,
            f"{name} is of a newer release of ckpt_component (version {version} of its answers; this release reads up "
            f"to {VERSION}); restore with that release, or from the checkpoints",
        )


def greet_peer(sock: Socket, secret: str, outside: Outside = OUTSIDE) -> Channel:
    """Let a client in that knows the secret; the counterpart of `connect_to_peer`.

    Args:
        sock: connected to it; closed if this raises
        secret: of this server's run
        outside: of this process

    Raises:
        PermissionError: it does not know the secret
        OSError: it hung up, or is too slow
    """
    until = outside.now() + _HANDSHAKE_SECONDS
    try:
        outside.watch_host(sock, PATIENCE_SECONDS)
        other = "the client at {} port {}".format(*sock.getpeername()[:2])
        ours = outside.random_bytes(_NONCE_BYTES)
        sock.settimeout(_HANDSHAKE_SECONDS)
        sock.sendall(_HELLO % VERSION + ours)
        answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES, until, outside)
        challenges = ours + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _derived(secret, b"proof of client", challenges)):
            sock.sendall(bytes(_PROOF_BYTES))  # which is wrong, so the other side says why it ends
            raise PermissionError(errno.EACCES, f"{other} does not know the secret of this run")
        sock.sendall(_derived(secret, b"proof of keeper", challenges))
        return _signed(sock, secret, challenges, (b"keeper", b"client"), other, outside)
    except BaseException:
        sock.close()
        raise


def _signed(
    sock: Socket, secret: str, challenges: bytes, sides: tuple[bytes, bytes], other: str, outside: Outside
) -> Channel:
    """The connection between two sides, our own first, once each knows that the other one knows the secret."""
    ours, theirs = (_derived(secret, b"key of " + side, challenges) for side in sides)
    signatures = FrameSignatures((ours, theirs), other)
    return Channel(sock, lambda: True, PATIENCE_SECONDS, outside=outside, signatures=signatures)


def _exactly(sock: Socket, count: int, until: float, outside: Outside) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(until - outside.now(), 0.001))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "it has hung up")
        data += part
    return data


def _derived(secret: str, purpose: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret.encode(), purpose + challenges, "sha256")
