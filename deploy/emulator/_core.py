"""The emulator's process: it holds the namespaces, shapes the links and answers requests on a socket.

Started as ``python -m deploy.emulator._core`` with its settings as JSON on stdin; it prints one line of JSON when the
network is ready. It ends on ``down``, on SIGTERM, or when the process that owns it ends. The kernel then removes the
namespaces and devices, since only open files of this process hold them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.emulator import _namespaces as ns
from deploy.emulator._backend import Backend, Ends, Hold, Netem, batch, kernel_has_netem
from deploy.emulator._link import CONTROL, FRAME_OVERHEAD_BYTES, WanProfile, change
from deploy.emulator._state import lock, socket_path, sweep
from deploy.emulator._topology import address, class_lines, core_lines, cut_line, site_lines
from geofed_pb.errors import GeofedError

SITE_SYSCTLS = {
    # 100 ms at 1 Gbit/s is 12.5 MB in flight; the default of 6 MB would be the bottleneck
    "net/ipv4/tcp_rmem": "4096 131072 134217728",
    "net/ipv4/tcp_wmem": "4096 65536 134217728",
    # a measurement must not inherit what an earlier connection learnt
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv6/conf/eth0/disable_ipv6": "1",
}


class Core:
    """All sites and links of one running emulator."""

    def __init__(self, profile: WanProfile, backend: str | None, state_dir: Path, ident: str) -> None:
        self.profile = profile
        self.sites = profile.sites
        self.links = dict(profile.links)
        self.cuts: set[tuple[str, str]] = set()
        self.ident = ident
        self._state_dir = state_dir
        self.rootless = ns.needs_user_namespace()
        self._started = time.time()
        self._ended = False
        self._build(backend)

    def _build(self, wanted: str | None) -> None:
        if self.rootless:
            ns.become_root_of_user_namespace()
        self.netns = [ns.new_netns() for _ in self.sites]
        self.inodes = [os.fstat(fd).st_ino for fd in self.netns]
        ns.new_netns()
        has_netem = kernel_has_netem()
        if wanted == "netem" and not has_netem:
            raise GeofedError(
                "EMULATOR_UNSUPPORTED", "this kernel has no netem", hint="leave --backend out, or set it to hold"
            )
        everyone = range(len(self.sites))
        batch("ip", core_lines(len(self.sites), [f"/proc/{os.getpid()}/fd/{fd}" for fd in self.netns]))
        _sysctl({"net/ipv4/ip_forward": "1"})
        for dst in everyone:
            batch("tc", class_lines(dst, [src for src in everyone if src != dst]))
        self.backend: Backend = Netem() if has_netem and wanted != "hold" else Hold()
        for index, site in enumerate(self.sites):
            outgoing = [link for (src, _), link in self.links.items() if src == site]
            with ns.inside(self.netns[index]):
                _sysctl(SITE_SYSCTLS)
                batch("ip", [*site_lines(index), self.backend.segment_line(outgoing)])
        with ns.inside(self.netns[0]):
            self.congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        self.backend.shape({self._ends(*pair): link for pair, link in self.links.items()})

    def _ends(self, src: str, dst: str) -> Ends:
        for site in (src, dst):
            if site not in self.sites:
                raise GeofedError(
                    "REGION_NOT_FOUND",
                    f"no site {site!r}; there are: {', '.join(self.sites)}",
                    hint="see `geofed emulator status`",
                )
        if src == dst:
            raise GeofedError("CONFIG_INVALID", f"no link leads from {src!r} to itself")
        return self.sites.index(src), self.sites.index(dst)

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of the control socket. Raises GeofedError."""
        match request["verb"]:
            case "status":
                return self.status()
            case "set":
                return self.set_links([tuple(pair) for pair in request["pairs"]], request["fields"])
            case "cut":
                return self.cut([tuple(pair) for pair in request["pairs"]])
            case "heal":
                return self.heal()
        raise GeofedError("INTERNAL", f"no verb {request['verb']!r}")

    def set_links(self, pairs: list[tuple[str, str]], fields: dict[str, Any]) -> dict[str, Any]:
        """Change fields of running links, and reshape them.

        Raises ``GeofedError`` for unknown sites or invalid values.
        """
        ends = {pair: self._ends(*pair) for pair in pairs}
        changed = {pair: change(self.links[pair], **fields) for pair in pairs}
        self.backend.shape({ends[pair]: link for pair, link in changed.items()})
        self.links.update(changed)
        for src in {pair[0] for pair in pairs}:
            outgoing = [link for (other, _), link in self.links.items() if other == src]
            with ns.inside(self.netns[self.sites.index(src)]):
                batch("ip", [self.backend.segment_line(outgoing)])
        return {}

    def cut(self, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        """Block all packets of the given directed links; returns how many were not cut before."""
        fresh = {pair: self._ends(*pair) for pair in pairs if pair not in self.cuts}
        batch("ip", [cut_line(*ends, cut=True) for ends in fresh.values()])
        self.cuts |= set(fresh)
        return {"cut": len(fresh)}

    def heal(self) -> dict[str, Any]:
        """Unblock all links that were cut; returns how many."""
        batch("ip", [cut_line(*self._ends(*pair), cut=False) for pair in self.cuts])
        healed, self.cuts = len(self.cuts), set()
        return {"healed": healed}

    def status(self) -> dict[str, Any]:
        """Return the sites, the links with their meters, and the report of the relay."""
        meters = self._meters()
        report = self.backend.relay_report()
        links = []
        for pair, link in self.links.items():
            back = self.links[pair[1], pair[0]]
            ends = self._ends(*pair)
            shape = asdict(link) | {"rtt_ms": link.delay_ms + back.delay_ms, "cut": pair in self.cuts}
            links.append(
                {"src": pair[0], "dst": pair[1], **shape, **meters[ends], "lost": self.backend.lost(report, ends)}
            )
        return {
            "id": self.ident,
            "pid": os.getpid(),
            "profile": self.profile.name,
            "backend": self.backend.name,
            "rootless": self.rootless,
            "congestion_control": self.congestion_control,
            "up_s": round(time.time() - self._started, 1),
            "relay": report and {key: report[key] for key in ("pid", "cpu_s", "late_ms")},
            "sites": [
                {"name": site, "address": address(i), "region": site != CONTROL, "netns": self.netns[i]}
                for i, site in enumerate(self.sites)
            ],
            "links": links,
        }

    def _meters(self) -> dict[Ends, dict[str, int]]:
        """Bytes and packets that left each link, and packets that its queue refused."""
        shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show"], capture_output=True, text=True, check=True)
        meters: dict[Ends, dict[str, int]] = {}
        for row in json.loads(shown.stdout):
            if not row.get("parent", "").startswith("1:"):
                continue
            meters[int(row["parent"][2:], 16) - 1, int(row["dev"][1:])] = {
                "bytes": row["bytes"] - FRAME_OVERHEAD_BYTES * row["packets"],
                "packets": row["packets"],
                "dropped": row["drops"],
            }
        return meters

    def state(self) -> dict[str, Any]:
        """Return what a later process needs to find this one, or to clean up after it."""
        return {"pid": os.getpid(), "id": self.ident, "inodes": self.inodes, "rootless": self.rootless}

    def end(self) -> None:
        """End the processes in the sites, and the back-end."""
        ns.end_processes(set(self.inodes))
        if not self._ended:
            self._ended = True
            self.backend.close()


def _sysctl(values: dict[str, str]) -> None:
    for key, value in values.items():
        path = Path("/proc/sys") / key
        if path.exists():
            path.write_text(value)


def serve(core: Core, state_dir: Path, owner: int | None) -> None:
    """Answer requests until ``down``, a signal, or the end of the owner (an open pidfd) or of the back-end."""
    directory = os.open(state_dir, os.O_PATH | os.O_CLOEXEC)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(socket_path(directory))
        os.chmod(socket_path(directory), 0o600)
        listener.listen(16)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(receiver, selectors.EVENT_READ)
        for end in (owner, core.backend.ended):
            if end is not None:
                selector.register(end, selectors.EVENT_READ)
        _announce(core, state_dir)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ready != [listener]:
                return
            if _answer(core, listener):
                return


def _announce(core: Core, state_dir: Path) -> None:
    fresh = state_dir / "state.json.new"
    fresh.write_text(json.dumps(core.state()))
    fresh.replace(state_dir / "state.json")
    print(json.dumps({"ok": core.status()}), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _answer(core: Core, listener: socket.socket) -> bool:
    """Serve one connection; True if it has requested ``down``."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rw") as stream:
        connection.settimeout(10)
        try:
            request = json.loads(stream.readline())
            if request["verb"] == "down":
                core.end()
                stream.write('{"ok": {}}\n')
                return True
            answer: dict[str, Any] = {"ok": core.handle(request)}
        except GeofedError as error:
            answer = {"error": error.as_dict()}
        except Exception as error:  # noqa: BLE001 - the error is answered, and the emulator continues
            answer = {"error": GeofedError("INTERNAL", f"{type(error).__name__}: {error}").as_dict()}
        try:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
        except OSError:
            pass  # the client has closed the connection
    return False


def main() -> int:
    """Entry point; settings on stdin: profile, backend, state_dir, id, owner."""
    settings = json.loads(sys.stdin.read())
    owner = None
    if settings["owner"] is None:
        if os.fork():
            os._exit(0)
    else:
        owner = os.pidfd_open(settings["owner"])
    state_dir = Path(settings["state_dir"])
    try:
        held = lock(state_dir)
    except BlockingIOError:
        error = GeofedError(
            "ILLEGAL_STATE", f"an emulator is running in {state_dir}", hint="end it first: `geofed emulator down`"
        )
        print(json.dumps({"error": error.as_dict()}), flush=True)
        return int(error.exit)
    try:
        sweep(state_dir)
        core = Core(WanProfile.from_dict(settings["profile"]), settings["backend"], state_dir, settings["id"])
    except (GeofedError, OSError, RuntimeError, subprocess.CalledProcessError) as problem:
        error = problem if isinstance(problem, GeofedError) else GeofedError("EMULATOR_UNSUPPORTED", str(problem))
        print(json.dumps({"error": error.as_dict()}), flush=True)
        return int(error.exit)
    try:
        serve(core, state_dir, owner)
    finally:
        core.end()
        sweep(state_dir)
        os.close(held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
