"""pip, but for building: it refuses what is no wheel, wherever that comes from.

pip's ``--only-binary`` holds for what its index offers. It still builds sources that a wheel requires by a URL, and
folders; to build a package is to run its code. A version of pip in which builds are started elsewhere fails here, and
installs nothing.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run pip with the arguments of the command line."""
    from pip._internal.cli.main import main as run
    from pip._internal.distributions.sdist import SourceDistribution
    from pip._internal.exceptions import InstallationError

    def refuse(source: SourceDistribution, *_: object, **__: object) -> None:
        raise InstallationError(f"{source.req.name or 'a package'} is required as sources; only wheels are installed")

    if not callable(getattr(SourceDistribution, "prepare_distribution_metadata", None)):
        sys.exit("ERROR: this version of pip builds packages in an unknown way")
    SourceDistribution.prepare_distribution_metadata = refuse  # type: ignore[method-assign,assignment]
    return int(run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
