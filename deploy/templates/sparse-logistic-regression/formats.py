"""LibSVM (libFM) and Criteo lines as arrays.

Each format has a function for one line, whose errors say what is expected, and one for many lines at once, in numpy,
with the same result. The latter returns None for anything unusual or wrong; then the lines are read one by one.
"""

import math
import re
import warnings

import numpy as np
import records

NUMBERS, CATEGORIES = 13, 26
COLUMNS = 1 + NUMBERS + CATEGORIES
MISSING = 1 << 32
"""Number that stands for an empty category; the 32-bit categories are all below."""
MOST = float(np.finfo(np.float32).max)


def read(lines, form, dimension):
    """Label and number of entries of each row; index and value of each entry. Raises ValueError at FILE:LINE."""
    one, many = (criteo_line, criteo_lines) if form == "criteo" else (libsvm_line, libsvm_lines)
    if form == "libsvm" and b"#" in lines.text:  # comments
        lines.text = re.sub(rb"#[^\n]*", b"", lines.text)
    arrays = many(lines.text, dimension)
    if arrays is not None:
        return arrays
    label, length, index, value = [], [], [], []
    for row_label, row_index, row_value in lines.each(lambda line: one(line, dimension)):
        label.append(row_label)
        length.append(len(row_index))
        index.extend(row_index)
        value.extend(row_value)
    dtypes = np.int8, np.int32, np.int32, np.float32
    return tuple(np.array(*pair) for pair in zip((label, length, index, value), dtypes, strict=True))


def detect(lines):
    """Detect the format by the first line that is not blank: Criteo's have tabs, and no colons. None if all are
    blank."""
    first, _ = lines.first()
    if not first:
        return None
    return "criteo" if b"\t" in first and not (b":" in first or first.startswith(b"#")) else "libsvm"


# label index:value index:value ...


def libsvm_line(line, dimension):
    """Read one LibSVM line; returns label, indices and values. Raises ``ValueError``."""
    fields = line.split()
    label = records.decimal(fields[0], "the label", MOST)
    if label not in (-1, 0, 1):
        raise ValueError(f"the label must be 1, or 0 or -1; it is {records.shown(fields[0])}")
    index, value = [], []
    for field in fields[1:]:
        before, colon, after = field.partition(b":")
        if not colon:
            raise ValueError(f"expected index:value, found {records.shown(field)}")
        index.append(records.whole(before, "the index in index:value"))
        value.append(records.decimal(after, "the value in index:value", MOST))
    if index and max(index) >= dimension:
        text = f"index {max(index)} is not below config.dimension, {dimension}"
        raise ValueError(f"{text}: raise it to {max(index) + 1} or more, alike for all regions")
    return label > 0, index, value


def libsvm_lines(text, dimension):
    """Read many LibSVM lines at once; None where a line is unusual or invalid."""
    if text[:1] in b" \n" or any(odd in text for odd in (b"\t", b"  ", b" \n", b"\n ", b"\n\n")):
        text = re.sub(rb" ?\n[ \n]*", b"\n", re.sub(rb"[ \t]+", b" ", text)).lstrip(b" \n")
    if not text:
        return None
    # Without the numbers, a line is " :" for each of its entries; and no number may be missing.
    marks = text.translate(None, b"0123456789.+-eE")
    if marks.replace(b" :", b"").strip(b"\n") or any(gap in text for gap in (b": ", b" :", b":\n")):
        return None
    if text.translate(None, b"0123456789").count(b" :") != text.count(b":"):  # an index holds more than digits
        return None
    length = np.diff(np.flatnonzero(np.frombuffer(marks, np.uint8) == ord("\n")), prepend=-1) // 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            numbers = np.fromstring(text.replace(b":", b" "), sep=" ")
    except (ValueError, DeprecationWarning):
        return None
    if len(numbers) != len(length) + 2 * length.sum():
        return None
    is_label = np.zeros(len(numbers), bool)
    is_label[np.cumsum(1 + 2 * length) - 1 - 2 * length] = True
    label, entries = numbers[is_label], numbers[~is_label].reshape(-1, 2)
    if not (np.isin(label, (-1, 0, 1)).all() and (np.abs(entries[:, 1]) <= MOST).all()):
        return None
    if entries[:, 0].max(initial=0) >= dimension:
        return None
    return label > 0, length, entries[:, 0].astype(np.int32), entries[:, 1].astype(np.float32)


# label I1 ... I13 C1 ... C26, with tabs: numbers are features 0 to 12, columns and categories are hashed beyond


def criteo_line(line, dimension):
    """Read one Criteo line; returns label, indices and values. Raises ``ValueError``."""
    fields = line.split(b"\t")
    if len(fields) != COLUMNS:
        form = f"a label, {NUMBERS} whole numbers and {CATEGORIES} hexadecimal categories, with tabs between them"
        raise ValueError(f"expected {COLUMNS} columns: {form}; found {len(fields)}")
    if fields[0] not in (b"0", b"1"):
        raise ValueError(f"the label must be 0 or 1; it is {records.shown(fields[0])}")
    index, value = list(range(NUMBERS)), []
    for column, field in enumerate(fields[1 : 1 + NUMBERS], 1):
        if not re.fullmatch(rb"(-?[0-9]{1,15})?", field):
            raise ValueError(f"number I{column} must be whole, or empty; it is {records.shown(field)}")
        number = int(field or 0)
        value.append(math.copysign(math.log1p(abs(number)), number))
    for column, field in enumerate(fields[1 + NUMBERS :], 1):
        if not re.fullmatch(rb"[0-9a-fA-F]{0,8}", field):
            text = "must have up to 8 hexadecimal digits, or be empty"
            raise ValueError(f"category C{column} {text}; it is {records.shown(field)}")
        category = int(field, 16) if field else MISSING
        index.append(NUMBERS + int(hashed(np.uint64(category), np.uint64(column), dimension - NUMBERS)))
    return fields[0] == b"1", index, value + [1.0] * CATEGORIES


def criteo_lines(text, dimension):
    """Read many Criteo lines at once; None where a line is unusual or invalid."""
    # Eight bytes in front, so that each field can be read as the eight bytes up to its end.
    padded = b"\n" * 8 + text
    array = np.frombuffer(padded, np.uint8)
    words = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))
    end = np.flatnonzero((array == ord("\t")) | (array == ord("\n")))[7:]
    ends_line = array[end[1:]] == ord("\n")
    if len(ends_line) % COLUMNS or ends_line.sum() * COLUMNS != len(ends_line):
        return None
    if not ends_line[COLUMNS - 1 :: COLUMNS].all():
        return None
    start, end = (end[:-1] + 1).reshape(-1, COLUMNS), end[1:].reshape(-1, COLUMNS)

    label_at, number_at, category_at = np.split(np.arange(COLUMNS), [1, 1 + NUMBERS])
    minus = array[start[:, number_at]] == ord("-")
    start[:, number_at] += minus
    length = end - start
    if (length > 8).any() or (length[:, label_at] != 1).any() or (length[:, number_at] == 0)[minus].any():
        return None
    word = words[end - 8]
    outside = (8 * (8 - np.maximum(length, 1))).astype(np.uint64)
    decimal_at = np.concatenate([label_at, number_at])
    number, digits = decimals(word[:, decimal_at], outside[:, decimal_at])
    empty = length == 0
    if (
        not (digits | empty[:, decimal_at]).all()
        or len(text.translate(None, b"0123456789abcdefABCDEF\t\n")) != minus.sum()
    ):
        return None
    label, number = number[:, 0], np.where(empty[:, number_at], 0, number[:, 1:])
    if label.max(initial=0) > 1:
        return None
    value = np.ones((len(end), NUMBERS + CATEGORIES), np.float32)
    value[:, :NUMBERS] = np.where(minus, -1, 1) * np.log1p(number)
    index = np.empty(value.shape, np.int32)
    index[:, :NUMBERS] = np.arange(NUMBERS)
    category = hexadecimals(word[:, category_at], outside[:, category_at])
    category = np.where(empty[:, category_at], np.uint64(MISSING), category)
    column = np.arange(1, CATEGORIES + 1, dtype=np.uint64)
    index[:, NUMBERS:] = NUMBERS + hashed(category, column, dimension - NUMBERS).astype(np.int32)
    return label == 1, np.full(len(label), value.shape[1]), index.ravel(), value.ravel()


def hashed(category, column, buckets):
    """A bucket for a category of a column: the finaliser of SplitMix64, the same on every machine."""
    with np.errstate(over="ignore"):
        mixed = category + column * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ mixed >> np.uint64(31)) % np.uint64(buckets)


# A word holds the last eight bytes of a field, the last one highest; so many bits of it lie outside of the field.


def every(byte):
    """A byte in all eight places."""
    return np.uint64(0x0101010101010101 * byte)


def decimals(word, outside):
    """Numbers of up to eight decimal digits, and whether they are that."""
    digit = (word ^ every(ord("0"))) >> outside << outside
    right = ((digit + every(0x7F - 9)) | digit) & every(0x80) == 0
    two = (digit * np.uint64(10) + (digit >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    four = (two * np.uint64(100) + (two >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    eight = (four * np.uint64(10_000) + (four >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return eight.astype(np.int64), right


def hexadecimals(word, outside):
    """Numbers of up to eight hexadecimal digits."""
    # A letter becomes what follows "9": "a" and "A" have 1 in their low four bits.
    digit = ((word & every(0x0F)) + (word >> np.uint64(6) & every(1)) * np.uint64(9)) >> outside << outside
    two = (digit << np.uint64(4) | digit >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    four = (two << np.uint64(8) | two >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    eight = (four << np.uint64(16) | four >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
    return eight
