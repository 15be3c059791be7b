"""Networks of namespaces on this machine, whose links can be cut or slowed down; as root, on Linux."""

import os
import shutil
import subprocess


def why_no_namespaces():
    """Say why a worker cannot have a network namespace here, or nothing if it can."""
    if os.getuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "the commands ip (package iproute2) and nsenter are not there"
    result = ip("netns", "add", f"ce{os.getpid()}", check=False)
    ip("netns", "delete", f"ce{os.getpid()}", check=False)
    return result.stderr.strip() and f"network namespaces are not permitted: {result.stderr.strip()}"


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Network:
    """A namespace for each worker, all on one bridge with the head."""

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
            ip("link", "delete", link, check=False)  # at once; with its namespace it would go some time later
            ip("netns", "delete", namespace, check=False)
        ip("link", "delete", self._bridge, check=False)

    def limit(self, index, rate):
        """Let no more than this rate, such as "10mbit", through a link in either direction."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        for where, device in (([], self._links[index]), (["-n", self.namespaces[index]], "eth0")):
            command = ["tc", *where, "qdisc", "add", "dev", device, *bucket]
            subprocess.run(command, check=True, capture_output=True, text=True)

    def cut(self, index):
        ip("link", "set", self._links[index], "down")

    def heal(self, index):
        ip("link", "set", self._links[index], "up")
