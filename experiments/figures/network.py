"""Networks of namespaces on this machine, whose links can be cut or slowed down.

They need root on Linux.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import threading


def why_no_namespaces():
    """Return why a worker cannot have a network namespace here, or "" if it can."""
    if os.getuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "the commands ip (package iproute2) and nsenter are not installed"
    result = ip("netns", "add", f"ce{os.getpid()}", check=False)
    ip("netns", "delete", f"ce{os.getpid()}", check=False)
    return (
        result.stderr.strip() and f"network namespaces are not permitted: {result.stderr.strip()}"
    )


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Network:
    """A network with a namespace for each worker, all on one bridge with the head."""

    def __init__(self, num_workers):
        self.namespaces = [f"ce{os.getpid()}-{index}" for index in range(num_workers)]
        self._links = [f"ce{os.getpid()}v{index}" for index in range(num_workers)]
        self._bridge, self._subnet = f"ce{os.getpid()}", f"10.79.{os.getpid() % 256}"
        self.head = f"{self._subnet}.1"

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self):
        ip("link", "add", self._bridge, "type", "bridge")
        ip("address", "add", f"{self.head}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for index, (namespace, link) in enumerate(zip(self.namespaces, self._links, strict=True)):
            ip("netns", "add", namespace)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", link, "master", self._bridge, "up")
            ip("-n", namespace, "address", "add", f"{self._subnet}.{index + 2}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")

    def __exit__(self, *_):
        for namespace, link in zip(self.namespaces, self._links, strict=True):
            # This deletes the link at once. With its namespace, it would go some time later.
            ip("link", "delete", link, check=False)
            ip("netns", "delete", namespace, check=False)
        ip("link", "delete", self._bridge, check=False)

    def limit(self, index, rate):
        """Limit a link to this rate in each direction, for example "10mbit"."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        for where, device in (([], self._links[index]), (["-n", self.namespaces[index]], "eth0")):
            command = ["tc", *where, "qdisc", "add", "dev", device, *bucket]
            subprocess.run(command, check=True, capture_output=True, text=True)

    def cut(self, index):
        ip("link", "set", self._links[index], "down")

    def heal(self, index):
        ip("link", "set", self._links[index], "up")


class Delay:
    """A relay of TCP connections, from its own port to another on the same host, that delays all
    bytes.

    tc could also delay them, but not every kernel has its netem. TCP does not notice the delay: its
    windows grow as they would without it.
    """

    def __init__(self, host, port, seconds):
        self._to, self._seconds, self._loop = (host, port), seconds, asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._relay, host))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _relay(self, reader, writer):
        # Either end may be killed.
        with (
            contextlib.suppress(OSError, asyncio.CancelledError),
            contextlib.closing(writer),
        ):
            other_reader, other_writer = await asyncio.open_connection(*self._to)
            with contextlib.closing(other_writer):
                await asyncio.gather(
                    self._hold_back(reader, other_writer), self._hold_back(other_reader, writer)
                )

    async def _hold_back(self, reader, writer):
        held = asyncio.Queue()

        async def receive():
            while data := await reader.read(2**16):
                held.put_nowait((self._loop.time() + self._seconds, data))
            held.put_nowait((self._loop.time() + self._seconds, b""))

        async def send():
            while True:
                when, data = await held.get()
                await asyncio.sleep(when - self._loop.time())
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        await asyncio.gather(receive(), send())

    def close(self):
        async def end():
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
