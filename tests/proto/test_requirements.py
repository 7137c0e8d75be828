"""Requirements files of tasks."""

from __future__ import annotations

import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.requirements import parse_requirements


def test_requirements_have_one_form() -> None:
    content = b"""# what it needs
SciPy >= 1.14,<2  # for sparse matrices

ruamel_yaml[jinja2]==0.18; python_version >= "3.11"
scipy>=1.14,<2
"""
    assert parse_requirements(content, "r.txt") == (
        'ruamel-yaml[jinja2]==0.18; python_version >= "3.11"',
        "scipy<2,>=1.14",
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"scipy\n-r other.txt", "r.txt:2: '-r other.txt' names no package"),
        (b"--index-url elsewhere", "r.txt:1: "),
        (b"./local", "r.txt:1: "),
        (b"scipy @ https://elsewhere/scipy.whl", "r.txt:1: scipy is given by a URL"),
        (b"scipy \\\n", "r.txt:1: "),
        (b"zzz===/../../../dev/shm/evil", "r.txt:1: zzz is given by ==="),
        (b"zzz===${AWS_SECRET_ACCESS_KEY}", "r.txt:1: zzz is given by ==="),
        (b"zzz==${HOME}", "r.txt:1: "),
        (b'scipy; os_name ~= "x"', "r.txt:1: the condition of scipy cannot be evaluated"),
        (b"\xff\xfe", "r.txt:1: "),
        (b"# nothing\n", "r.txt names no package"),
        (b"\n".join(b"p%d" % number for number in range(201)), "more than 200"),
        (b"a" * (65 << 10), "larger than 64 KiB"),
    ],
)
def test_what_leads_elsewhere_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(GeofedError) as raised:
        parse_requirements(content, "r.txt")
    assert raised.value.code == "TASK_INVALID"
    assert told in raised.value.message
