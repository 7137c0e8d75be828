"""No communication at all: the most steps that any contender can do."""

from __future__ import annotations

from peer import Course, parse, parser


def main() -> None:
    course = Course(parse(parser()))
    while course.running:
        course.compute()
        course.stepped()


if __name__ == "__main__":
    main()
