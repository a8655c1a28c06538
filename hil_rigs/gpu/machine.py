"""What the GPU of this machine is, for `blink rig probe gpu`, reports and evidence."""

from __future__ import annotations

from typing import Any

from blink_core.runtime.gpu_events import EventError, NvmlEvents

WRITES_ORDERING = {0: "none", 100: "owner", 200: "all devices"}  # cudaGPUDirectRDMAWritesOrdering


class GpuUnusable(RuntimeError):
    """There is no GPU that CUDA can use; the message says why."""


def gpu_facts(device: int = 0) -> dict[str, str | int]:
    """Name, driver, clocks, memory and RDMA attributes of a GPU. Raises GpuUnusable."""
    import cupy

    try:
        if cupy.cuda.runtime.getDeviceCount() <= device:
            raise GpuUnusable("there is no GPU")
        properties: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(device)
        free, total = cupy.cuda.Device(device).mem_info
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise GpuUnusable(f"there is no usable GPU: {error}") from error
    facts: dict[str, str | int] = {
        "gpu": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": int(properties["multiProcessorCount"]),
        "memory_bytes": int(total),
        "memory_free_bytes": int(free),
        "cuda_driver": int(cupy.cuda.runtime.driverGetVersion()),
        "cuda_runtime": int(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
    }
    bus = str(cupy.cuda.runtime.deviceGetPCIBusId(device))
    return facts | {"pci_bus_id": bus} | _attributes(device) | _management(bus) | {"xid_events": xid_events(bus)}


def xid_events(bus: str) -> str:
    """Whether NVML would tell an engine of this GPU's Xid errors: "delivered", or why not."""
    try:
        events = NvmlEvents(bus)
    except EventError as error:
        return f"not watched ({error})"
    events.close()
    return "delivered"


def _attributes(device: int) -> dict[str, str | int]:
    """What an RDMA rig would need to know."""
    from cuda.bindings import driver

    names = driver.CUdevice_attribute
    found: dict[str, str | int] = {}
    for name, attribute in (
        ("rdma_writes_ordering", names.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        ("gpudirect_rdma", names.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        ("dma_buf", names.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
    ):
        error, value = driver.cuDeviceGetAttribute(attribute, device)
        found[name] = f"unknown ({error.name})" if int(error) else int(value)
    ordering = found["rdma_writes_ordering"]
    if isinstance(ordering, int):
        found["rdma_writes_ordering"] = WRITES_ORDERING.get(ordering, str(ordering))
    return found


def _management(bus: str) -> dict[str, str | int]:
    """What NVML says of the GPU at a PCI address; nothing where it is not there. Its numbers are not CUDA's."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return {"nvml": f"unavailable ({type(error).__name__})"}
    found: dict[str, str | int] = {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
        for name, read in (
            ("driver", pynvml.nvmlSystemGetDriverVersion),
            ("sm_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            ("sm_clock_max_mhz", lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            ("memory_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            ("power_limit_mw", lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle)),
            ("power_mw", lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
            ("ecc", lambda: int(pynvml.nvmlDeviceGetEccMode(handle)[0])),
            ("processes", lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        ):
            try:
                value = read()
                found[name] = value.decode() if isinstance(value, bytes) else value
            except pynvml.NVMLError as error:
                found[name] = f"unknown ({error})"
    except pynvml.NVMLError as error:
        found["nvml"] = f"knows no GPU {bus} ({error})"
    finally:
        pynvml.nvmlShutdown()
    return found
