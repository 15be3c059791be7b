"""Security over tcp: the CURVE keys of a run, and the check that admits only its workers' key.

CURVE (https://rfc.zeromq.org/spec/26) encrypts messages, and proves to the worker that the head has
the run's server key. ZAP (https://rfc.zeromq.org/spec/27) decides which keys the head admits:
without it, anyone who knows the server's public key could connect. Each run makes its own keys,
or `clusterenv_runtime.keys` makes them in advance. They lie in a file that only its owner can read.
"""

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from .errors import StartupError

logger = logging.getLogger(__name__)
Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]  # Z85


@dataclass
class WorkerKeys:
    """The keys that a worker needs, each 40 characters of Z85."""

    server_public: Key
    worker_public: Key
    worker_secret: Key

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Let a worker's socket talk only to the head that has the server's secret key."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_publickey = self.worker_public.encode()
        socket.curve_secretkey = self.worker_secret.encode()


Keys = TypeVar("Keys", bound=WorkerKeys)


@dataclass
class HeadKeys(WorkerKeys):
    """The keys that the head needs: the workers' keys, and the server's secret key."""

    server_secret: Key

    @classmethod
    def make(cls) -> "HeadKeys":
        """Return fresh keys."""
        server_public, server_secret = zmq.curve_keypair()
        keys = server_public, *zmq.curve_keypair(), server_secret
        return cls(*(key.decode() for key in keys))

    def workers(self) -> WorkerKeys:
        """Return the keys that a worker may know."""
        return WorkerKeys(self.server_public, self.worker_public, self.worker_secret)


def write_key_file(path: str | os.PathLike[str], keys: WorkerKeys) -> None:
    """Write keys to a new file that only its owner can read.

    Raises:
        OSError: the file exists or cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(keys))


def read_key_file(
    path: str | os.PathLike[str],
    kind: type[Keys] = WorkerKeys,  # type: ignore[assignment]
) -> Keys:
    """Return the keys in a file that `write_key_file` wrote.

    Raises:
        StartupError: the file cannot be read, others can read it, or it does not hold such keys;
            the error message says which.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            raise StartupError(
                f"others can read the key file {path} (mode {mode:04o}): chmod 600 it"
            )
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise StartupError(f"cannot read the key file {path}: {error.strerror}") from None
    except ValueError as error:
        whose = "worker" if kind is WorkerKeys else "head"
        raise StartupError(f"{path} is not a {whose}'s key file: {error}") from None


class Gate:
    """The head's side of CURVE: it makes the socket a server that admits only the workers' key."""

    def __init__(
        self, context: zmq.Context[Any], socket: zmq.Socket[bytes], keys: HeadKeys
    ) -> None:
        self._worker_public = keys.worker_public.encode()
        self.refused = 0  # connections refused so far
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether to admit the owner of this key. zmq.auth asks for each connection."""
        if key == self._worker_public:
            return True
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "refused a connection with a foreign key; others will be refused silently"
            )
        return False

    def close(self) -> None:
        self._authenticator.stop()
