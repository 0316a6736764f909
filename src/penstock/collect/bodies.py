"""Records of a request's body."""

from penstock.web.responses import Problem


def lines(body: bytes, most: int, count: int) -> list[bytes]:
    """The records of a body with one on each line; Problem when there are more than `count`, or one is too large."""
    found: list[bytes] = []
    start, number = 0, 0
    # Not split(): a body of line feeds alone would become millions of lines at once.
    while start < len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        line = body[start:end].removesuffix(b"\r")
        start, number = end + 1, number + 1
        if len(line) > most:
            raise too_large(f"line {number}", most)
        if line:
            found.append(line)
        if len(found) > count:
            why = f"there are more than {count} records; nothing was taken"
            raise Problem(413, f"line {number}", why, "send less in more requests")
    if not found:
        raise Problem(400, "the body", "it is empty", "send a record on each line")
    return found


def too_large(place: str, most: int, lines: bool = False) -> Problem:
    """The answer to a record beyond `max_size`. `lines`: whether a body may hold one record on each line."""
    fix = "a larger one needs a larger max_size= of the source, and on Kafka max.message.bytes of its channel"
    if lines:
        fix = f"if it holds one record on each line, post it to ?lines; {fix}"
    why = f"it is larger than the {most:,} bytes that a record may have; nothing was taken"
    return Problem(413, place, why, fix, {"limit": most, "option": "max_size"})
