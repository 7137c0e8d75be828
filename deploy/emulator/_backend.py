"""The two back-ends that delay packets, with one interface: the kernel's netem, and the relay in user space."""

from __future__ import annotations

import subprocess
from typing import Any, Protocol

from deploy.emulator._hold import RelayProcess
from deploy.emulator._link import EmulatedLink
from deploy.emulator._nfqueue import send_to_queues
from deploy.emulator._topology import address, fifo_lines, netem_lines, rate_line, segment_bytes

Ends = tuple[int, int]
"""A directed link by the indices of its sites."""


class Backend(Protocol):
    """Shapes links inside the core's namespace; the calling thread must be in it."""

    name: str
    ended: int | None
    """Descriptor that becomes readable when the back-end's process has ended; None: it has no process."""

    def segment_line(self, links: list[EmulatedLink]) -> str:
        """``ip`` line that limits the segments which a site with these links may send."""

    def shape(self, changes: dict[Ends, EmulatedLink]) -> None:
        """Set the shapes of these links; may be called again at any time."""

    def relay_report(self) -> dict[str, Any] | None:
        """Return CPU seconds, lateness and losses of a relay in user space; None: there is none."""

    def lost(self, report: dict[str, Any] | None, ends: Ends) -> int | None:
        """Return the random losses of a link from a report, which the kernel's counters do not contain."""

    def close(self) -> None:
        """Release resources that would outlive the namespaces."""


class Netem:
    """tc htb + netem."""

    name = "netem"
    ended: int | None = None

    def segment_line(self, links: list[EmulatedLink]) -> str:
        """Return the line for `ip` that limits segments to one packet if any link is shaped."""
        # netem draws and counts whole segments, so they must be packets already
        segments = 1 if any(link.shaped for link in links) else 65_535
        return f"link set eth0 gso_max_segs {segments}"

    def shape(self, changes: dict[Ends, EmulatedLink]) -> None:
        """Set rate, delay, jitter and loss of links."""
        lines = []
        for (src, dst), link in changes.items():
            lines += [rate_line(src, dst, link), *netem_lines(src, dst, link)]
        batch("tc", lines)

    def relay_report(self) -> dict[str, Any] | None:
        """Return None: the kernel holds the packets."""
        return None

    def lost(self, report: dict[str, Any] | None, ends: Ends) -> int | None:
        """Return None: the kernel's counters contain the losses."""
        return None

    def close(self) -> None:
        """Do nothing: the namespaces hold everything."""
        return


class Hold:
    """tc htb for the rate, NFQUEUE and the relay for delay, jitter and loss."""

    name = "hold"

    def __init__(self) -> None:
        self._relay = RelayProcess()
        self.ended: int | None = self._relay.ended
        self._known: set[Ends] = set()
        self._held: dict[Ends, EmulatedLink] = {}

    def segment_line(self, links: list[EmulatedLink]) -> str:
        """Return the line for `ip` that limits the size of segments to what the links' rates allow."""
        return f"link set eth0 gso_max_size {segment_bytes(links)}"

    def shape(self, changes: dict[Ends, EmulatedLink]) -> None:
        """Set rates in the kernel and the rest in the relay, and queue the packets of links that are held."""
        lines = []
        for ends, link in changes.items():
            lines += [rate_line(*ends, link), *fifo_lines(*ends, link)]
            if link.held:
                self._held[ends] = link
                self._known.add(ends)
            else:
                self._held.pop(ends, None)
        batch("tc", lines)
        # queues must be served before rules send packets there
        self._relay.shape({_number(ends): link for ends, link in changes.items() if ends in self._known})
        send_to_queues({(address(src), address(dst)): _number((src, dst)) for src, dst in self._held})

    def relay_report(self) -> dict[str, Any] | None:
        """Return CPU seconds, lateness and losses of the relay."""
        return self._relay.shape({})

    def lost(self, report: dict[str, Any] | None, ends: Ends) -> int | None:
        """Return the random losses of a link from the relay's report."""
        return None if report is None else int(report["lost"].get(str(_number(ends)), 0))

    def close(self) -> None:
        """End the relay."""
        self._relay.close()


def _number(ends: Ends) -> int:
    return ends[0] << 8 | ends[1]


def kernel_has_netem() -> bool:
    """Whether the kernel has netem, tried on the loopback device of the calling thread's namespace."""
    trial = subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"], capture_output=True)
    if trial.returncode == 0:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True, capture_output=True)
    return trial.returncode == 0


def batch(tool: str, lines: list[str]) -> str:
    """Run lines of ``ip`` or ``tc`` in one process in the calling thread's namespace; returns its output.

    Raises RuntimeError with the tool's message.
    """
    text = "\n".join(line for line in lines if line) + "\n"
    done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{tool}: {done.stderr.strip()}")
    return done.stdout
