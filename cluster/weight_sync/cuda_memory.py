"""Memory of a GPU that processes share by CUDA IPC handles, through calls of the driver.

torch shares tensors too, but not those in expandable segments of its pool, and it keeps their reference counts in
/dev/shm, where a killed process leaves them. Memory of the driver's own allocator has neither limit.
Source: CUDA Driver API, sections "Memory Management" (cuIpc*).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


@dataclass(frozen=True)
class DeviceMemory:
    """`tensor` must not be used after `free`; memory that another process has open must not be freed."""

    tensor: torch.Tensor  # uint8 [N]
    handle: bytes
    free: Callable[[], None]


class _Array:
    """Memory as torch takes it."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def create(num_bytes: int, device: torch.device) -> DeviceMemory:
    """Allocates memory outside torch's pool.

    Raises:
        OSError: the driver refused it.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context this thread's own
        pointer, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        except OSError:
            _call("cuMemFree_v2", pointer)
            raise
    tensor = torch.as_tensor(_Array(int(pointer.value), num_bytes), device=device)
    return DeviceMemory(tensor, bytes(handle), lambda: _end("cuMemFree_v2", pointer, device))


def open_handle(handle: bytes, num_bytes: int, device: torch.device) -> DeviceMemory:
    """Maps memory that another process has created on the same GPU.

    Raises:
        OSError: the driver refused it.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        pointer = ctypes.c_uint64()
        taken = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), taken, ctypes.c_uint(LAZY_PEER_ACCESS))
    tensor = torch.as_tensor(_Array(int(pointer.value), num_bytes), device=device)
    return DeviceMemory(tensor, handle, lambda: _end("cuIpcCloseMemHandle", pointer, device))


def _end(function: str, pointer: ctypes.c_uint64, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # no kernel uses the memory any more
        _call(function, pointer)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise OSError(f"{function} failed: {(name.value or b'unknown').decode()} ({code})")
