"""Free memory of a device, and copies to it."""

from __future__ import annotations

import os
from typing import Any

import torch

from splince_fast.exceptions import NotEnoughMemoryError

Tensor = Any


def free_memory(device: Any) -> int | None:
    """Bytes that are free on a device; None where it does not say."""
    if device.type == "cuda":
        # Blocks that torch holds and does not use are taken by the next tensors.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def check_memory(device: Any, n_sites: int, width: int) -> None:
    """Raise NotEnoughMemoryError unless the states of all sites fit, before any is made."""
    needed, free = 8 * n_sites * width * width, free_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"the states of {n_sites} sites of {width} features take {needed:,} bytes, and "
            f"{device} has {free:,} free; collect at fewer sites at a time, or on a device with "
            "more memory (device='cpu')"
        )


def on_device(values: Tensor, device: Any) -> Tensor:
    """A tensor of the host on a device; the host does not wait for the copy to a GPU."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
