"""More requests at once than the engine can take: each is answered, none is lost, and nothing is kept of them."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from hil_rigs.local import LocalRig
from tests.integration.test_bad_input import settled
from verification.properties.kv_conservation import check_snapshot

BURSTS = (10_000, 4_000)  # requests; the first fills caches and the heap, so that what the second leaves can be told
# Sockets, each with its share of the requests written at once, as HTTP/1.1 pipelining allows. Both ends of each may be
# counted against one limit of open files, of which some are left for everything else.
CONNECTIONS = min(2_000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2)
DEADLINE_S = 120.0
MOST_KEPT = 16 << 20  # bytes that the second burst may add to what the first one left: fragments of the heap
MOST_AT_ONCE = 64 << 10  # bytes that a request may take while it waits


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def _answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return Answer(int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"])))


async def _ask(host: str, port: int, request: bytes, count: int) -> list[Answer]:
    """`count` requests on one connection, all written before the first answer is read."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request * count)
        return [await _answer(reader) for _ in range(count)]
    finally:
        writer.close()


async def _burst(rig: LocalRig, requests: int) -> list[Answer]:
    url = urlsplit(rig.base_url)
    assert url.hostname is not None
    assert url.port is not None
    body = json.dumps({"model": rig.model_name, "prompt": [3, 4], "max_tokens": 1, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.hostname}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connections = min(CONNECTIONS, requests)
    shares = [requests // connections + (n < requests % connections) for n in range(connections)]
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(_ask(url.hostname, url.port, request, share) for share in shares))
    return [answer for group in answers for answer in group]


def _resident(rig: LocalRig) -> int:
    return sum(psutil.Process(rig.pid(name)).memory_info().rss for name in ("engine", "frontend"))


def _peak(rig: LocalRig) -> int:
    """Most bytes that the front end ever had resident (proc(5), VmHWM)."""
    with open(f"/proc/{rig.pid('frontend')}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def test_every_request_of_a_burst_is_answered(tiny_rig: LocalRig) -> None:
    """Catches: a request lost, answered twice or hung under overload; a refusal that is no 429 or names no Retry-After;
    memory or KV pages that stay behind, on the way of answers or of refusals."""
    after: list[int] = []
    seen: Counter[int] = Counter()
    for requests in BURSTS:
        before = _peak(tiny_rig)
        answers = asyncio.run(_burst(tiny_rig, requests))
        codes = Counter(answer.status for answer in answers)
        seen += codes
        assert sum(codes.values()) == requests
        assert set(codes) <= {200, 429}, codes
        assert codes[200] >= tiny_rig.descriptor.config.slots
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status == 429)
        texts = {json.loads(answer.body)["choices"][0]["text"] for answer in answers if answer.status == 200}
        assert len(texts) == 1, "the same greedy request got different answers"
        assert check_snapshot(settled(tiny_rig)).ok()
        assert _peak(tiny_rig) - before <= MOST_AT_ONCE * requests
        after.append(_resident(tiny_rig))
    assert seen[429] > 0, "no request was refused: the burst was none"
    print(f"{seen}, resident after each burst: {[n >> 10 for n in after]} KiB, peak {_peak(tiny_rig) >> 10} KiB")
    assert after[-1] - after[0] <= MOST_KEPT
