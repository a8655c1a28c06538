"""Records shared with the resident scheduler: `device/serve_records.cuh` and `device/kernels/step_*.cu` say what they
mean."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np

MAX_BUCKETS = 64
MAX_PLANS = 4
MOST_LAUNCHES = 118
NEXT_ROW_BYTES, STEADY_ROWS = 48, 256  # device/next.hpp: a row of the next plan, and most of them
# device/group.hpp: moments of a boundary, in their order.
PHASES = (
    "seen", "prepared", "judged", "written", "planned", "chosen", "fenced", "launched", "finished", "looked", "ready",
)  # fmt: skip


class Failure(IntEnum):
    """Why a device-driven engine failed."""

    NONE = 0
    LAUNCH = 1
    OVERDUE = 2
    NO_BUCKET = 3
    LOST_STEP = 4
    RENEWAL = 5


FAILURE_TEXT = {
    Failure.LAUNCH: "a step graph could not be launched from the device: CUDA error {detail} at step {step}",
    Failure.OVERDUE: "step {step} took longer than its limit",
    Failure.NO_BUCKET: "no step graph fits step {step} of {detail} tokens",
    Failure.LOST_STEP: "step {step} was launched and its graph did not end",
    Failure.RENEWAL: "the scheduler's graph could not launch itself again: CUDA error {detail} at step {step}",
}

BUCKET = np.dtype([(n, np.uint32) for n in ("tokens", "rows", "samples", "decode", "tail", "first", "count", "pad")])
MIRROR = np.dtype([("source", np.uint64), ("target", np.uint64), ("nbytes", np.uint64), ("kind", np.uint64)])
SAMPLE = np.dtype([(n, np.uint64) for n in ("step", "seen", "planned", "launched")])
REPORT = np.dtype(
    [
        (n, np.uint64)
        for n in ("ended", "failure", "failure_detail", "failure_step", "executions", "launches", "refused", "steady")
    ]
)
SERVE_BYTES = 440
SERVE_DONE = 0  # offset of the word that a step graph's last kernel writes


class ServeParams(ctypes.Structure):
    """``ServeParams`` of serve_records.cuh."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("shared", "state", "log", "plan", "serve", "report", "buckets")),
        *((n, ctypes.c_void_p) for n in ("executables", "mirrors", "header_mirror", "samples", "redo")),
        ("phases", ctypes.c_void_p),
        *((n, ctypes.c_uint32) for n in ("n_buckets", "n_mirrors", "n_samples", "original_max")),
        ("step_limit_ns", ctypes.c_uint64),
        ("run_limit_ns", ctypes.c_uint64),
        ("branch", ctypes.c_uint64),
        ("loop", ctypes.c_uint64),
        ("watched", ctypes.c_uint64),
    ]


class StepViewParams(ctypes.Structure):
    """``StepViewParams`` of step_view.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("config", "header", "plan_rows", "token_ids", "positions", "kv_slots")),
        *((n, ctypes.c_void_p) for n in ("sampling", "bias", "token_pool", "masks", "sizes")),
        *((n, ctypes.c_void_p) for n in ("out_token_ids", "out_positions", "out_kv_slots", "row_starts")),
        *((n, ctypes.c_void_p) for n in ("context_lens", "table_rows", "sample_tokens", "sample_rows", "begun")),
        *((n, ctypes.c_void_p) for n in ("redo", "block_tables", "angles")),
        *((n, ctypes.c_int) for n in ("rows", "tokens", "samples", "original_max", "long_angles")),
    ]


class StepEndParams(ctypes.Structure):
    """``StepEndParams`` of step_end.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("header", "done", "begun", "times")),
        ("attention", ctypes.c_void_p * MAX_PLANS),
        ("n_plans", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("redo", ctypes.c_void_p),
    ]


class NoopParams(ctypes.Structure):
    """``NoopParams`` of step_end.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("header", "plan_rows", "results", "top_tokens", "top_logprobs")),
        ("width", ctypes.c_int),
        ("begun", ctypes.c_void_p),
        ("spin_ns", ctypes.c_uint64),
    ]


class CaptureParams(ctypes.Structure):
    """``CaptureParams`` of step_end.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("header", "plan_rows", "results", "sample_rows", "sizes", "logits")),
        ("stride", ctypes.c_longlong),
        ("records", ctypes.c_void_p),
        ("vocab", ctypes.c_uint32),
        ("record_bytes", ctypes.c_uint32),
    ]


class CaptureEndParams(ctypes.Structure):
    """``CaptureEndParams`` of step_end.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("sizes", "header", "offered", "taken")),
        ("limit_ns", ctypes.c_uint64),
    ]
