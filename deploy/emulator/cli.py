"""The command ``wan-emulator``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli._options import Output
from control_plane.cli._output import columns, emit, say
from control_plane.cli._settings import Format, settings
from control_plane.cli.main import run
from deploy.emulator import Emulator, load_profile, profile_names
from geofed_pb.errors import GeofedError

app = typer.Typer(
    name="wan-emulator",
    help="Emulate a WAN between regions on one machine: a network namespace per region, a shaped link per direction.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


StateDir = Annotated[
    Path, typer.Option(envvar="GEOFED_EMULATOR_STATE", help="Where the emulator keeps its socket and state.")
]
_STATE_DIR = Path(".geofed/emulator")


@app.command(epilog="Example: geofed emulator up china-eu-us-3")
def up(
    profile: Annotated[str, typer.Argument(help="A shipped profile (see `profiles`) or a YAML file.")],
    state_dir: StateDir = _STATE_DIR,
    backend: Annotated[str | None, typer.Option(help="netem or hold; by default what the kernel has.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Start an emulated WAN; it runs until `down`."""
    if backend not in (None, "netem", "hold"):
        raise GeofedError("CONFIG_INVALID", f"no back-end {backend!r}", hint="choose netem or hold")
    emulator = Emulator(load_profile(profile), state_dir=state_dir, backend=backend).start(daemon=True)
    _show(emulator.status())
    say(f"up with back-end {emulator.backend}; run things inside with `geofed emulator exec SITE -- COMMAND`")


@app.command(epilog="Example: geofed emulator status -o json")
def status(state_dir: StateDir = _STATE_DIR, output: Output = Format.TABLE) -> None:
    """Show sites, addresses, and every link with its shape and meters."""
    _show(Emulator.attach(state_dir).status())


def _show(data: dict[str, Any]) -> None:
    addresses = {row["name"]: row["address"] for row in data["sites"]}
    heads = ("FROM", "TO", "ADDRESS OF TO", "MBIT/S", "DELAY MS", "JITTER MS", "LOSS", "STATE", "BYTES")
    table: list[list[object]] = []
    for link in data["links"]:
        rate = "-" if link["rate_mbps"] is None else f"{link['rate_mbps']:g}"
        shape = [rate, f"{link['delay_ms']:g}", f"{link['jitter_ms']:g}", f"{link['loss']:g}"]
        state = "cut" if link["cut"] else "up"
        table.append([link["src"], link["dst"], addresses[link["dst"]], *shape, state, link["bytes"]])
    if settings.format is Format.TABLE:
        say(f"profile {data['profile']}, back-end {data['backend']}, TCP {data['congestion_control']}")
    emit(data, table=lambda _: columns(heads, table), name=lambda shown: str(shown["profile"]))


@app.command(
    name="exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: geofed emulator exec frankfurt -- ip address",
)
def exec_(
    site: Annotated[str, typer.Argument(help="`control` or a region.")],
    command: Annotated[list[str], typer.Argument(help="The command, after `--`.")],
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Run a command inside a site; its exit status becomes this command's."""
    emulator = Emulator.attach(state_dir)
    argv = emulator.command(site, command[1:] if command[0] == "--" else command)
    os.execvpe(argv[0], argv, emulator.environment())


@app.command(name="set", epilog="Example: geofed emulator set frankfurt virginia --rate 50mbit --delay 40ms --both")
def set_(
    src: Annotated[str, typer.Argument(metavar="FROM")],
    dst: Annotated[str, typer.Argument(metavar="TO")],
    rate: Annotated[str | None, typer.Option(help="100mbit, 1gbit, 512kbit, or none for unshaped.")] = None,
    delay: Annotated[str | None, typer.Option(help="One way: 20ms, 0.1s.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Half width around the delay: 2ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="0.5% or 0.005.")] = None,
    both: Annotated[bool, typer.Option("--both", help="Change the way back too.")] = False,
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Change a live link; fields that are not named stay."""
    fields: dict[str, float | None] = {}
    if rate is not None:
        fields["rate_mbps"] = None if rate == "none" else _quantity(rate, {"kbit": 1e-3, "mbit": 1, "gbit": 1e3, "": 1})
    if delay is not None:
        fields["delay_ms"] = _quantity(delay, {"ms": 1, "s": 1e3, "us": 1e-3, "": 1})
    if jitter is not None:
        fields["jitter_ms"] = _quantity(jitter, {"ms": 1, "s": 1e3, "us": 1e-3, "": 1})
    if loss is not None:
        fields["loss"] = _quantity(loss, {"%": 0.01, "": 1})
    if not fields:
        raise GeofedError("CONFIG_INVALID", "nothing to change", hint="give --rate, --delay, --jitter or --loss")
    Emulator.attach(state_dir).set_link(src, dst, both=both, **fields)


def _quantity(text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z%]*)", text.strip().lower())
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise GeofedError("CONFIG_INVALID", f"cannot read {text!r}", hint=f"a number and one of: {known}")
    return float(match[1]) * units[match[2]]


@app.command(epilog="Example: geofed emulator partition shanghai")
def partition(
    site: Annotated[str, typer.Argument(help="The site to cut off.")],
    others: Annotated[list[str] | None, typer.Argument(help="From these only; by default from all.")] = None,
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Cut a site off: packets in both directions are dropped without an answer."""
    Emulator.attach(state_dir).partition(site, *(others or []))


@app.command(epilog="Example: geofed emulator heal")
def heal(state_dir: StateDir = _STATE_DIR) -> None:
    """Undo every partition."""
    Emulator.attach(state_dir).heal()


@app.command(epilog="Example: geofed emulator calibrate --seconds 1")
def calibrate(
    state_dir: StateDir = _STATE_DIR,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each transfer, after its warm-up.")] = 3.0,
    link: Annotated[list[str] | None, typer.Option(help="FROM:TO; may be repeated. By default all regions.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Where to write the JSON; by default in the state directory.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Measure round trips and throughput against the profile; off by more than 5 % is an error."""
    pairs = None if link is None else [_pair(text) for text in link]
    result = Emulator.attach(state_dir).calibrate(seconds=seconds, links=pairs)
    result.write(write or state_dir / "calibration.json")
    heads = ("FROM", "TO", "RTT MS", "MEASURED", "MBIT/S", "MEASURED", "LOSS", "MEASURED", "RESULT")
    table: list[list[object]] = []
    for row in result.links:
        asked = "-" if row.rate_mbps is None else row.rate_mbps
        lost = "-" if row.measured_loss is None else row.measured_loss
        verdict = "; ".join(row.faults) or "ok"
        rtts = [row.rtt_ms, row.measured_rtt_ms]
        table.append([row.src, row.dst, *rtts, asked, row.measured_mbps, row.loss, lost, verdict])
    emit(result.as_dict(), table=lambda _: columns(heads, table), name=lambda _: str(write or state_dir))
    say(f"back-end {result.backend}, TCP {result.congestion_control}")
    if not result.ok:
        # The data are on stdout already; the error repeats the result for users.
        settings.format = Format.TABLE
        result.require()


def _pair(text: str) -> tuple[str, str]:
    src, colon, dst = text.partition(":")
    if not colon:
        raise GeofedError("CONFIG_INVALID", f"{text!r} is not a link", hint="write it as FROM:TO")
    return src, dst


@app.command(epilog="Example: geofed emulator down")
def down(state_dir: StateDir = _STATE_DIR) -> None:
    """End the WAN and the processes in it; also cleans up after an emulator that was killed."""
    if not state_dir.exists():
        raise GeofedError("EMULATOR_OFF", f"no emulator is running in {state_dir.absolute()}")
    Emulator.at(state_dir).down()


@app.command(epilog="Example: geofed emulator profiles")
def profiles(output: Output = Format.TABLE) -> None:
    """List the shipped profiles."""
    found = [load_profile(name) for name in profile_names()]
    rows = [(profile.name, len(profile.regions), profile.description) for profile in found]
    emit(
        {"profiles": [profile.as_dict() for profile in found]},
        table=lambda _: columns(("NAME", "REGIONS", "DESCRIPTION"), rows),
        name=lambda _: "\n".join(profile.name for profile in found),
    )


def main() -> None:
    """Run the command; the exit status follows the catalogue of errors."""
    run(app)


if __name__ == "__main__":
    main()
