"""The bound and the rivals, each by its own published package and at the best setting found for these links."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import peer_environments
from contender import REGIONS, Contender, Scene, Setting

_PEERS = Path(__file__).resolve().parent / "peers"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",  # as the emulator names it
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_LIGHTHOUSE_PORT = 29510

Arguments = Callable[[Scene], Sequence[str]]


def bound() -> Contender:
    """No communication."""
    return Contender("bound", "bound", _processes(sys.executable, "bound.py"), _rounds(1, 3), quick=True)


def rivals(folder: Path) -> list[Contender]:
    """All rivals; ``folder`` holds their virtual environments, or will."""

    def ddp(name: str, hook: str, steps: int, bucket_mb: int, quick: bool = False) -> Contender:
        arguments = ["--hook", hook, "--bucket-mb", str(bucket_mb)]
        return Contender(
            name,
            "rival",
            _processes(sys.executable, "ddp.py", lambda scene: arguments),
            _steps(4, steps),
            versions=lambda: peer_environments.versions(sys.executable, ("torch",)),
            quick=quick,
        )

    def torchft(name: str, method: str, quick: bool = False) -> Contender:
        def start(scene: Scene) -> None:
            at = f"{scene.addresses[0]}:{_LIGHTHOUSE_PORT}"
            lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", at, "--min_replicas", str(len(REGIONS))]
            lighthouse += ["--join_timeout_ms", "10000", "--quorum_tick_ms", "10"]
            scene.start(REGIONS[0], lighthouse, {"RUST_LOG": "error"})
            arguments = ["--method", method, "--lighthouse", f"http://{at}"]
            if method == "streaming":
                # a fragment may travel until the next one is due
                arguments += ["--fragments", "4", "--delay", str(scene.setting.local_steps // 4 - 1)]
            _processes(python, "torchft_peer.py", lambda scene: arguments)(scene)

        python = peer_environments.python(folder, "torchft")
        packages = ("torchft", "torch", "numpy")
        return _installed(folder, "torchft", packages, name, start, _rounds(1, 3), quick)

    def hivemind(name: str, compression: str, quick: bool = False) -> Contender:
        python = peer_environments.python(folder, "hivemind")
        start = _processes(
            python,
            "hivemind_peer.py",
            lambda scene: ["--compression", compression, "--meeting", str(scene.folder / "meeting")],
        )
        packages = ("hivemind", "torch", "numpy")
        return _installed(folder, "hivemind", packages, name, start, _rounds(1, 4), quick)

    def flower(name: str) -> Contender:
        python = peer_environments.python(folder, "flwr")
        start = _processes(python, "flower_peer.py", lambda scene: ["--folder", str(scene.folder / "flower")])
        return _installed(folder, "flwr", ("flwr", "numpy"), name, start, _rounds(1, 3), False)

    return [
        ddp("ddp", "none", 4, 25),
        ddp("ddp-fp16", "fp16", 6, 25),
        ddp("ddp-powersgd", "powersgd", 20, 100, quick=True),
        flower("flower-fedavg"),
        torchft("torchft-localsgd", "local-sgd"),
        torchft("torchft-diloco", "diloco"),
        torchft("torchft-streaming", "streaming", quick=True),
        hivemind("hivemind-fp16", "fp16"),
        hivemind("hivemind-8bit", "uniform8", quick=True),
    ]


def _installed(
    folder: Path,
    environment: str,
    packages: tuple[str, ...],
    name: str,
    start: Callable[[Scene], None],
    window: Callable[[Setting], tuple[int, int]],
    quick: bool,
) -> Contender:
    return Contender(
        name,
        "rival",
        start,
        window,
        versions=lambda: peer_environments.versions(peer_environments.python(folder, environment), packages),
        prepare=lambda: peer_environments.prepare(folder, environment),
        quick=quick,
    )


def _processes(python: str | Path, script: str, arguments: Arguments = lambda scene: ()) -> Callable[[Scene], None]:
    """Starts a script once per region, with the options that all peers take and its own."""

    def start(scene: Scene) -> None:
        common = ["--addresses", ",".join(scene.addresses), "--compute-ms", f"{scene.setting.compute_ms:g}"]
        common += ["--local-steps", str(scene.setting.local_steps)]
        common += ["--warmup", str(scene.warmup), "--exchanges", str(scene.exchanges), *arguments(scene)]
        for rank, region in enumerate(REGIONS):
            own = ["--rank", str(rank), "--marks", str(scene.marks(region))]
            scene.start(region, [str(python), str(_PEERS / script), *own, *common], _ENVIRONMENT)

    return start


def _rounds(warmup: int, exchanges: int) -> Callable[[Setting], tuple[int, int]]:
    """A window in rounds of local steps; three times as many where links cost nothing, for the sake of precision."""
    return lambda setting: (warmup, exchanges if setting.rate_mbps is not None else 3 * exchanges)


def _steps(warmup: int, exchanges: int) -> Callable[[Setting], tuple[int, int]]:
    """A window where every step exchanges."""
    return lambda setting: (warmup, exchanges if setting.rate_mbps is not None else 100)
