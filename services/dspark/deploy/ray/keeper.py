"""The process below `dspark up` that holds a cluster on this machine: Ray's driver, the embedded
Valkey, and the socket that commands ask. `python -m dspark.deploy.ray.keeper`, which reads its
order from stdin.

Whatever ends it, nothing below stays: it adopts orphans and ends them, also when `dspark up` is
killed, which a pipe tells; and `dspark up` does the same if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dspark.core.errors import Cancelled, ConfigError, DsparkError, InvalidRequest, Unavailable
from dspark.deploy.ray import changes, processes
from dspark.deploy.ray.changes import Patience
from dspark.deploy.ray.driver import (
    DriverDoor,
    ray_environment,
    resources,
    start_ray,
    start_serve,
)
from dspark.deploy.ray.kept_valkey import STORE, kept_valkey
from dspark.deploy.ray.observed import seen
from dspark.deploy.ray.order import SOCKET, Order
from dspark.deploy.ray.resources import check_fit, named
from dspark.deploy.ray.serve_config import FAREWELL_S

# Seconds for processes to be gone once they are killed.
KILL_S = 10.0
# Seconds for all pools to be ready: a checkpoint may have to be fetched and converted.
READY_S = 1800.0
# Seconds between two looks at the pools of a cluster that runs.
LOOK_S = 1.0
# Looks in a row without an answer until Ray counts as dead.
LOST = 15
# Bytes of a question: a configuration of Serve.
MOST_BYTES = 16 * 2**20


class Keeper:
    """orphaned: `dspark up` is gone, and everything here is being ended."""

    def __init__(self, order: Order, begun: float, orphaned: threading.Event) -> None:
        self._order = order
        self._orphaned = orphaned
        self._begun = begun
        self._folder = Path(order.folder)
        self._door = DriverDoor()
        self._asked = asyncio.Event()
        self._gave_up = threading.Event()
        self._forced = False
        self._served = False
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    async def run(self) -> int:
        """Until somebody wants it down or Ray dies; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        kept = kept_valkey(self._folder, self._orphaned.is_set, self._tell)
        async with kept if self._order.embed else contextlib.nullcontext(), self._control():
            running = asyncio.create_task(self._run())
            asked = asyncio.create_task(self._asked.wait())
            await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            status = 0
            if running.done() and not running.cancelled() and (error := running.exception()):
                if not isinstance(error, DsparkError):
                    raise error
                status = _told(error)
            running.cancel()
            self._gave_up.set()
            await self._take_down(hurry=status != 0)
            self._tell("stopped")
            self._send({"done": None})
            await asyncio.sleep(0)  # on its way
            return status

    async def _run(self) -> None:
        self._tell("starting Serve")
        await asyncio.to_thread(start_serve)
        self._served = True
        patience = Patience(READY_S, self._tell, self._gave_up.is_set, at_once=True)
        await asyncio.to_thread(changes.apply, self._door, self._order.serve, patience)
        took = time.monotonic() - self._begun
        print(f"READY  cluster {self._order.name}, after {took:.0f} s", flush=True)
        for line in self._order.ready:
            print(line, flush=True)
        await self._watch()

    async def _watch(self) -> None:
        """Tell what becomes of the pools. Raises Unavailable when Ray does not answer any more."""
        said: dict[str, str] = {}
        lost = 0
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                details = await asyncio.to_thread(self._door.details)
            except Unavailable as error:
                lost += 1
                if lost >= LOST:
                    raise Unavailable(f"Ray has died: {error}") from None
                continue
            lost = 0
            now = {name: pool.told() for name, pool in seen(details).items()}
            for name, line in now.items():
                if said and said.get(name) != line:
                    self._tell(f"{name}: {line}")
            said = now

    async def _take_down(self, *, hurry: bool) -> None:
        """Drain, unless it is to be quick."""
        if hurry or self._forced or not self._served:
            return
        try:
            pools = (await asyncio.to_thread(lambda: seen(self._door.details()))).values()
            bound = changes.drain_s(pools)
            self._tell(f"draining: what runs has up to {bound - FAREWELL_S:g} s to finish")
            patience = Patience(bound, self._tell, lambda: self._forced)
            await asyncio.to_thread(changes.take_down, self._door, patience)
        except Cancelled:
            self._tell("stopping at once")
        except DsparkError as error:
            self._tell(f"could not drain: {error}")

    def _stop(self) -> None:
        """Asked to once it drains, twice it ends at once."""
        if self._asked.is_set():
            self._forced = True
        self._asked.set()
        self._gave_up.set()

    def _tell(self, line: str) -> None:
        """From any thread."""
        say(f"[{time.monotonic() - self._begun:5.1f} s] {line}")
        self._send({"said": line})

    def _send(self, answer: dict[str, Any]) -> None:
        """To who wants the cluster down."""
        for listener in tuple(self._listeners):
            listener(answer)

    # --- commands of other terminals --------------------------------------------------------------

    @asynccontextmanager
    async def _control(self) -> AsyncIterator[None]:
        path = str(self._folder / SOCKET)  # in a folder that only its owner may enter
        async with await asyncio.start_unix_server(self._answer, path, limit=MOST_BYTES) as server:
            yield
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def send(answer: dict[str, Any]) -> None:
            writer.write(json.dumps(answer).encode() + b"\n")

        def listen(answer: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(send, answer)

        try:
            asked = json.loads(await reader.readline())
            if asked["ask"] == "down":
                self._listeners.append(listen)
                self._stop()
                if asked["force"]:
                    self._stop()
                with contextlib.suppress(asyncio.CancelledError):
                    await reader.read()  # until the caller goes, or this process does
                self._listeners.remove(listen)
            else:
                send({"done": await self._do(asked)})
        except DsparkError as error:
            send({"error": str(error)})
        except (ValueError, KeyError, TypeError, ConnectionError) as error:
            send({"error": f"is no question: {error}"})
        finally:
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()

    async def _do(self, asked: dict[str, Any]) -> Any:
        if self._asked.is_set():
            raise Unavailable("the cluster is stopping")
        if not self._served:
            raise Unavailable("the cluster is just starting")
        if asked["ask"] == "details":
            found = await asyncio.to_thread(self._door.details)
            return {**found, "resources": await asyncio.to_thread(resources)}
        if asked["ask"] == "put":
            return await asyncio.to_thread(self._door.put, asked["config"])
        raise ValueError(asked["ask"])


def _told(error: DsparkError) -> int:
    """As the `dspark` command does it; the exit status."""
    say(f"dspark: {' '.join(str(error).split())}")
    return 2 if isinstance(error, InvalidRequest | ConfigError) else 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_with(pipe: int, folder: Path, orphaned: threading.Event) -> None:
    """Wait for the end of `dspark up`; if it did not end us before, it was killed."""
    with contextlib.suppress(OSError):
        os.read(pipe, 1)
    orphaned.set()
    processes.kill_below(KILL_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    begun = time.monotonic()
    order = Order(**json.load(sys.stdin))
    folder = Path(order.folder)
    for descriptor in (order.pipe, order.lock):
        os.set_inheritable(descriptor, False)
    processes.adopt_orphans()
    orphaned = threading.Event()
    watch = partial(_end_with, order.pipe, folder, orphaned)
    threading.Thread(target=watch, daemon=True).start()
    os.environ.update(ray_environment())
    if order.embed:
        os.environ["REDIS_URL"] = f"unix://{folder / STORE}"
    try:
        say(f"[{time.monotonic() - begun:5.1f} s] starting Ray")
        # In this thread: the kernel ends Ray's processes when the thread that began them ends.
        applications = order.serve["applications"]
        start_ray(folder / "ray", named(applications))
        check_fit(applications, resources())
        return asyncio.run(Keeper(order, begun, orphaned).run())
    except DsparkError as error:
        return _told(error)
    finally:
        processes.kill_below(KILL_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    status = main()
    # Ray's own end would wait for processes that are gone.
    sys.stdout.flush()
    os._exit(status)
