"""A stand-in for the W&B server on loopback, with what `wandb sweep` and `wandb agent` need."""

import itertools
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

SWEEP = "me/clusterenv/standin1"


class Handler(BaseHTTPRequestHandler):
    """Answers GraphQL with one method for each operation. Accepts all other requests, which are
    metrics of the client.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body, answer = self.read(), {}
        if self.path == "/graphql":
            request = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
            with self.server.lock:
                self.server.operations.append(operation)
                variables = request.get("variables") or {}
                answer = {"data": getattr(self, operation, dict)(**variables)}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def read(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size + 2)[:-2]
        self.rfile.readline()
        return body

    def log_message(self, *_):
        pass

    def Viewer(self, **_):
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    def UpsertSweep(self, config, **_):
        self.server.config = yaml.safe_load(config)
        project = {"name": "clusterenv", "entity": {"name": "me"}}
        sweep = {"name": "standin1", "project": project}
        return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}

    def SweepWithRuns(self, **_):
        keys = {"id": "1", "name": "standin1", "runs": {"edges": []}, "state": "RUNNING"}
        return {"project": {"sweep": {**keys, "config": yaml.safe_dump(self.server.config)}}}

    def CreateAgent(self, **_):
        self.server.agents += 1
        return {"createAgent": {"agent": {"id": str(self.server.agents)}}}

    def Heartbeat(self, id, runState, **_):  # noqa: N803
        commands = []
        if not json.loads(runState):  # this agent is idle: give it the next configuration
            server, commands = self.server, [{"type": "exit"}]
            if server.given < len(grid := server.grid()):
                args = {name: {"value": value} for name, value in grid[server.given].items()}
                command = {"type": "run", "run_id": f"run{server.given}", "args": args}
                commands = [{**command, "program": server.config["program"]}]
                server.given += 1
        return {"agentHeartbeat": {"agent": {"id": id}, "commands": json.dumps(commands)}}


class Server(ThreadingHTTPServer):
    """Holds one sweep and gives out each of its configurations once.

    Attributes:
        config: The sweep.
        operations: The names of the requested GraphQL operations.
        given: How many configurations were given out.
        agents: How many agents there were.
    """

    daemon_threads = True

    def __init__(self, config=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.config, self.operations, self.lock = config, [], threading.Lock()
        self.given = self.agents = 0

    def grid(self):
        parameters = self.config["parameters"]
        values = [keys.get("values") or [keys["value"]] for keys in parameters.values()]
        return [dict(zip(parameters, row, strict=True)) for row in itertools.product(*values)]

    def environment(self, home):
        """Return the variables that make W&B's client talk to this server, and to it alone."""
        url = f"http://127.0.0.1:{self.server_port}"
        wandb = {"WANDB_BASE_URL": url, "WANDB_API_KEY": 40 * "0", "WANDB_ERROR_REPORTING": "false"}
        return {**wandb, "HOME": str(home)}


@contextmanager
def serve(config=None):
    with Server(config) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
