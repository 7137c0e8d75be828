"""Records of a text file, many lines at a time.

A file is read in one pass and never held whole as text; `.gz` is decompressed while reading. Errors name the file and
the line.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np

STRETCH = 1 << 18
"""Bytes that are read at a time: some thousand lines, small next to a worker's memory."""
LONGEST_LINE = 16 << 20
"""Bytes of a line at most, so that a file without line breaks is an error before it fills the memory."""


class Lines:
    """Whole lines of a file; `number` is that of the first."""

    def __init__(self, path, number, text):
        self.path, self.number = path, number
        if number == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")  # with which some programs begin UTF-8
        self.text = text.replace(b"\r\n", b"\n") if b"\r" in text else text

    def first(self):
        """The first line that is not blank, and its number; or an empty one."""
        blank = len(self.text) - len(self.text.lstrip(b" \n"))
        return self.text[blank:].partition(b"\n")[0], self.number + self.text.count(b"\n", 0, blank)

    def each(self, parse):
        """Parse line by line, without blank ones; errors of `parse` get the file and the line number."""
        for number, line in enumerate(self.text.split(b"\n"), self.number):
            try:
                if line.strip():
                    yield parse(line)
            except ValueError as error:
                raise ValueError(f"{self.path}:{number}: {error}") from None


def stretches(path):
    """Yield a file as `Lines`, many at a time."""
    number, rest = 1, b""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            while read := file.read(STRETCH):
                text = rest + read
                end = text.rfind(b"\n") + 1
                text, rest = text[:end], text[end:]
                if text:
                    yield Lines(path, number, text)
                    number += text.count(b"\n")
                if len(rest) > LONGEST_LINE:
                    raise ValueError(f"{path}:{number}: the line is longer than {LONGEST_LINE >> 20} MiB")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number}: it cannot be unpacked from about here on: {error}") from None
    if rest:
        yield Lines(path, number, rest + b"\n")


def files_of(uri, endings):
    """Return the file itself, or the files with these endings in a folder; each ending may have `.gz` after it."""
    path = Path(uri)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not there")
    wanted = (*endings, *(f"{ending}.gz" for ending in endings))
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(wanted))
    if not found:
        raise FileNotFoundError(f"{path} holds no files that end in {', '.join(endings)}, with or without .gz")
    return found


def joined(parts, dtype):
    """Concatenate arrays, and empty the list."""
    whole = np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.empty(0, dtype)
    parts.clear()
    return whole


def shown(field):
    """Return a field as text for an error."""
    return repr(field[:40].decode("ascii", "backslashreplace")) + ("…" if len(field) > 40 else "")


def whole(field, name):
    """Return a field as an integer from 0 on. Raises ``ValueError``."""
    if not (field.isdigit() and len(field) <= 15):
        raise ValueError(f"{name} must be a whole number, from 0 on; it is {shown(field)}")
    return int(field)


def decimal(field, name, most):
    """Return a field as a finite number of a magnitude up to `most`. Raises ``ValueError``."""
    try:
        value = float(field) if b"_" not in field else most * 2
    except ValueError:
        value = most * 2
    if not abs(value) <= most:
        raise ValueError(f"{name} must be a number, of a size up to {most:g}; it is {shown(field)}")
    return value
