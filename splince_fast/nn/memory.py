"""Memory of the states: whether there is room, and where it is taken."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from splince_fast.exceptions import NotEnoughMemoryError

Tensor = Any

# Bytes that an arena takes at a time; malloc maps as many by themselves, whatever came before.
_PIECE = 1 << 25
_ALIGNED = 64


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


class Arena:
    """Room outside of the heap, for what stays through a pass.

    On the heap it would lie between the temporaries of a model, and the allocator would give those
    back to the system and fetch them again at every layer: tens of thousands of page faults. NumPy
    asks for huge pages where an array is as large as a piece of the arena.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, dtype: Any, *shape: int) -> Tensor:
        """A tensor that nothing was written to."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        n = torch.Size(shape).numel() * dtype.itemsize
        if n > len(self._free):
            self._free = torch.from_numpy(np.empty(max(n, _PIECE), np.uint8))
        found, self._free = self._free[:n], self._free[-(-n // _ALIGNED) * _ALIGNED :]
        return found.view(dtype).view(shape)
