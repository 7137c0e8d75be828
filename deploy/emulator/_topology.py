"""Commands that build the network: veth pairs from every site to the core, and a shaping class per directed link.

All functions are pure; they return lines for ``ip -batch`` and ``tc -batch``.

    site i --eth0===s<i>-- core --s<j>===eth0-- site j

The core routes by destination. Device ``s<j>`` in the core shapes packets to site j, with one htb class per source:
class ``1:<i+1>`` of device ``s<j>`` is the directed link from i to j, and its counters are the link's meters.
"""

from __future__ import annotations

from deploy.emulator._link import FRAME_OVERHEAD_BYTES, MTU_BYTES, EmulatedLink

UNSHAPED_MBPS = 200_000
"""Rate of an unshaped link's class, above what any machine reaches."""
CUT_PRIORITY = 100
"""Priority of the routing rules that cut links."""


def address(index: int) -> str:
    """IPv4 address of the site with this index."""
    return f"10.213.{index}.2"


def device(index: int) -> str:
    """Return the name of the core's device to a site."""
    return f"s{index}"


def queue_bytes(link: EmulatedLink) -> int:
    """Return the size of the queue before the rate limit: two bandwidth-delay products of the round trip, at least
    512 KiB.

    Shorter queues drop packets of senders whose windows grow in bursts; queues of wide-area routers are about this
    long.
    """
    rate_bytes_s = (link.rate_mbps or UNSHAPED_MBPS) * 125_000
    return min(256 << 20, max(512 << 10, int(2 * rate_bytes_s * 2 * link.delay_ms / 1000)))


def segment_bytes(links: list[EmulatedLink]) -> int:
    """Return the largest segment that a site may send at once.

    A segment of 64 KiB occupies a slow link for long, which causes jitter that no real link has.
    """
    rates = [link.rate_mbps for link in links if link.rate_mbps is not None]
    return 16_384 if rates and max(rates) <= 400 else 65_536


def core_lines(count: int, site_netns: list[str]) -> list[str]:
    """``ip`` lines for the core: a veth pair per site; ``site_netns[i]`` is the path of its namespace."""
    lines = []
    for index in range(count):
        name = device(index)
        lines += [
            f"link add {name} type veth peer name eth0 netns {site_netns[index]}",
            f"addr add 10.213.{index}.1/24 dev {name}",
            f"link set {name} up",
        ]
    return lines


def site_lines(index: int) -> list[str]:
    """``ip`` lines for one site."""
    return [
        f"addr add {address(index)}/24 dev eth0",
        "link set eth0 up",
        f"route add default via 10.213.{index}.1",
    ]


def class_lines(dst: int, sources: list[int]) -> list[str]:
    """``tc`` lines that give device ``s<dst>`` its root and one class per source, unshaped for now."""
    name = device(dst)
    lines = [f"qdisc add dev {name} root handle 1: htb default 0"]
    for src in sources:
        lines += [
            f"class add dev {name} parent 1: classid 1:{src + 1:x} {_rate(EmulatedLink())}",
            f"filter add dev {name} parent 1: protocol ip prio 1 u32 match ip src {address(src)}/32 "
            f"flowid 1:{src + 1:x}",
        ]
    return lines


def rate_line(src: int, dst: int, link: EmulatedLink) -> str:
    """The ``tc`` line that gives a link's class its rate."""
    return f"class change dev {device(dst)} parent 1: classid 1:{src + 1:x} {_rate(link)}"


def _rate(link: EmulatedLink) -> str:
    # htb counts Ethernet frames, a link's rate counts IP packets
    mbps = link.rate_mbps or UNSHAPED_MBPS
    bits = int(mbps * 1e6 * (MTU_BYTES + FRAME_OVERHEAD_BYTES) / MTU_BYTES)
    burst = min(4 << 20, max(2 * (MTU_BYTES + FRAME_OVERHEAD_BYTES), int(bits / 8 / 1000)))
    return f"htb rate {bits}bit ceil {bits}bit burst {burst} cburst {burst} quantum 60000"


def fifo_lines(src: int, dst: int, link: EmulatedLink) -> list[str]:
    """``tc`` lines for the byte-limited queue of a link's class."""
    return [_leaf(src, dst, f"bfifo limit {queue_bytes(link)}")]


def netem_lines(src: int, dst: int, link: EmulatedLink) -> list[str]:
    """``tc`` lines for a link that real netem delays; packets in flight and in the queue share its limit."""
    packets = 1000 + 2 * queue_bytes(link) // MTU_BYTES
    delay = f" delay {link.delay_ms * 1000:.0f}us" if link.delay_ms else ""
    jitter = f" {link.jitter_ms * 1000:.0f}us" if link.jitter_ms else ""
    loss = f" loss {link.loss * 100:.6f}%" if link.loss else ""
    return [_leaf(src, dst, f"netem limit {packets}{delay}{jitter}{loss}")]


def _leaf(src: int, dst: int, what: str) -> str:
    return f"qdisc replace dev {device(dst)} parent 1:{src + 1:x} handle {src + 0x10:x}: {what}"


def cut_line(src: int, dst: int, *, cut: bool) -> str:
    """Return the ``ip`` line that drops the packets of a link without an answer, or forwards them again."""
    verb = "add blackhole" if cut else "del blackhole"
    return f"rule {verb} from {address(src)} to {address(dst)} priority {CUT_PRIORITY}"
