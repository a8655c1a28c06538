"""The load under which faults strike: requests over HTTP and on the suite's ring, each followed to its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from blink_core.abi.enums import ErrorReason, EventKind, FinishReason
from blink_core.frontend.ring_client import Handle, RingClient
from hil_rigs.local import LocalRig
from verification.faults.model import End
from verification.history import enum_name
from verification.program import RequestSpec

HTTP_TIMEOUT_S = 60.0
POLL_S = 0.02


@dataclass
class Call:
    """One request and what its client saw. `output`: token ids on the ring, text pieces over HTTP."""

    name: str
    spec: RequestSpec
    end: End = End.OPEN
    detail: str = ""
    output: list[int | str] = field(default_factory=list)
    ended_at: float = 0.0
    after_end: int = 0  # events that came after the terminal one
    handle: Handle | None = None
    started: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)

    def finish(self, end: End, detail: str) -> None:
        self.end, self.detail, self.ended_at = end, detail, time.monotonic()

    def seen(self) -> list[int | str] | str:
        """What was delivered: token ids, or one text; the pieces that a text came in are the server's business."""
        return "".join(map(str, self.output)) if self.output and isinstance(self.output[0], str) else self.output


class Lane(Protocol):
    """A way to the engine."""

    def start(self, call: Call) -> None:
        """Sends a request; its `started` is set with its first token, its `end` with its last."""

    def pump(self, seconds: float) -> None:
        """Takes in events for up to so many seconds."""


class HttpLane:
    """Completions over HTTP, streamed, one thread each."""

    def __init__(self, rig: LocalRig) -> None:
        self._rig = rig

    def start(self, call: Call) -> None:
        threading.Thread(target=self._follow, args=(call,), name=f"blink-{call.name}", daemon=True).start()

    def pump(self, seconds: float) -> None:
        time.sleep(seconds)

    def _follow(self, call: Call) -> None:
        try:
            call.finish(*self._stream(call))
        except (httpx.HTTPError, OSError) as error:
            call.finish(End.DISCONNECTED, f"{type(error).__name__}: {error}")
        except (ValueError, LookupError, TypeError) as error:  # not what the API says
            call.finish(End.ERROR, f"bad response: {type(error).__name__}: {error}")

    def _stream(self, call: Call) -> tuple[End, str]:
        params = call.spec.params
        body: dict[str, Any] = {
            "model": self._rig.model_name,
            "prompt": list(call.spec.prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stream": True,
        }
        url = f"{self._rig.base_url}/v1/completions"
        reason = ""
        with httpx.stream("POST", url, json=body, timeout=HTTP_TIMEOUT_S) as response:
            if response.status_code != 200:
                response.read()
                return End.ERROR, f"HTTP {response.status_code}: {response.text[:200]}"
            for line in response.iter_lines():
                if call.leave.is_set():
                    return End.LEFT, "the client closed the connection"
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return (End.FINISHED, reason) if reason else (End.ERROR, "a stream without a finish reason")
                value = json.loads(data)
                if "error" in value:
                    return End.ERROR, str(value["error"].get("code") or value["error"].get("message"))
                for choice in value["choices"]:
                    call.output.append(str(choice["text"]))
                    reason = choice["finish_reason"] or reason
                call.started.set()
        return End.DISCONNECTED, "the stream ended without [DONE]"


class RingLane:
    """Requests on the suite's own ring. `consume` False withholds the credits of what is polled."""

    def __init__(self, client: RingClient) -> None:
        self.client = client
        self.consume = True
        self.foreign: list[dict[str, int]] = []  # events of no request of this lane
        self._calls: dict[tuple[int, int], Call] = {}

    def start(self, call: Call) -> None:
        handle = self.client.submit(call.spec.prompt, call.spec.params)
        call.handle = handle
        self._calls[handle.slot, handle.generation] = call

    def pump(self, seconds: float) -> None:
        for event in self.client.poll(seconds, consume=self.consume):
            kind, reason = int(event["kind"]), int(event["reason"])
            call = self._calls.get((int(event["slot"]), int(event["generation"])))
            if call is None:
                self.foreign.append({name: int(event[name]) for name in ("slot", "generation", "kind", "reason")})
            elif call.end is not End.OPEN:
                call.after_end += 1
            elif kind == EventKind.LOGPROBS:
                continue  # they belong to the token that follows
            elif kind == EventKind.TOKEN:
                call.output.append(int(event["token"]))
                call.started.set()
            elif kind == EventKind.FINISH:
                end = End.CANCELLED if reason == FinishReason.CANCELLED else End.FINISHED
                call.finish(end, enum_name(FinishReason, reason).lower())
            else:
                call.finish(End.ERROR, enum_name(ErrorReason, reason))


def await_calls(calls: Sequence[Call], lane: Lane, deadline: float, *, started: bool = False) -> bool:
    """Pumps a lane until all calls have ended (or have begun to speak); False when the deadline comes first."""

    def waiting() -> bool:
        return any(call.end is End.OPEN and not (started and call.started.is_set()) for call in calls)

    while waiting():
        if time.monotonic() > deadline:
            return False
        lane.pump(POLL_S)
    return True
