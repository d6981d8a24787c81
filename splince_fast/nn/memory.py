"""Free memory of a device, and copies of tensors to a device."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from splince_fast.exceptions import NotEnoughMemoryError


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None if it is unknown."""
    if device.type == "cuda":
        # Memory that torch has reserved but does not use is free for new tensors.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
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


def check_memory(device: torch.device, n_sites: int, width: int) -> None:
    """Raise NotEnoughMemoryError unless the states of `n_sites` sites fit in free memory."""
    needed, free = 8 * n_sites * width * width, free_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"the states of {n_sites} sites of {width} features take {needed:,} bytes, and "
            f"{device} has {free:,} free; collect at fewer sites at a time, or on a device with "
            "more memory (device='cpu')"
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; a copy from the CPU to a GPU is asynchronous."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
