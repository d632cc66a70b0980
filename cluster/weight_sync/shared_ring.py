"""Ring of shared memory between processes of one host, on the CPU or a GPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

_logger = logging.getLogger(__name__)

# Memory of a GPU that processes share by CUDA IPC handles, through calls of the driver.
#
# torch shares tensors too, but not those in expandable segments of its pool, and it keeps their reference counts in
# /dev/shm, where a killed process leaves them. Memory of the driver's own allocator has neither limit.
# Source: CUDA Driver API, sections "Memory Management" (cuIpc*).

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
    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def create(num_bytes: int, device: torch.device) -> DeviceMemory:
    """Allocates memory outside torch's pool."""
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
    """Maps memory that another process has created on the same GPU."""
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


# A ring of memory that one process writes and other processes of its host read; each chunk is written once for all.
#
# The memory has no name. A reader gets it from the writer over a Unix socket: as a file descriptor of host memory, or
# as a CUDA IPC handle where both use the same GPU. So the size of /dev/shm does not matter, and the system frees the
# memory when its last process ends, however it ends. The sockets carry one message a chunk, and tell each side at
# once that the other has died.

NUM_CHUNKS = 4
CHUNK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 24}  # on a CPU, what its cache holds until the readers have copied it
RANK = struct.Struct("=i")
PEER = struct.Struct("=iII")  # pid, uid, gid of a socket's other end (unix(7), SO_PEERCRED)
HOST_MEMORY, DEVICE_MEMORY, ACCEPTED, WRITTEN, READ = b"h", b"d", b"a", b"w", b"r"
Way = Literal["network", "host", "device"]


@dataclass(frozen=True)
class Location:
    """Where a member of a transfer group runs."""

    host: str  # the same in processes that can share memory; empty where a process shares none
    device: str  # cpu, or the UUID of a GPU
    process: int
    address: str  # of its socket

    @classmethod
    def here(cls, device: torch.device, address: bytes, *, shares: bool) -> Location:
        name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
        return cls(host_name() if shares else "", name, os.getpid(), address.decode())

    def way_to(self, receiver: Location, transport: str) -> Way:
        """How bytes travel from this sender to `receiver`, where `transport` connects hosts. NCCL copies between the
        GPUs of a host by itself. A process cannot open a handle of its own memory."""
        if not self.host or self.host != receiver.host:
            return "network"
        if self.device != receiver.device:
            return "network" if transport == "nccl" else "host"
        return "host" if self.device == "cpu" or self.process == receiver.process else "device"


def host_name() -> str:
    """Name of the kernel, network namespace and user of this process; empty where memory cannot be shared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        os.close(os.memfd_create("mobula"))
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.geteuid()}"
    except (OSError, AttributeError) as error:  # AttributeError: only Linux has memory files
        _logger.warning("weights of engines on this host travel over the network: no memory can be shared (%s)", error)
        return ""


@contextmanager
def listener() -> Iterator[socket.socket]:
    """A socket in the abstract namespace, which leaves no file, that readers connect to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0mobula-{secrets.token_hex(16)}")
        listening.listen(socket.SOMAXCONN)
        yield listening


class RingWriter:
    """The writer's end."""

    def __init__(self, memory: torch.Tensor, readers: Sequence[socket.socket], free: Callable[[], None]) -> None:
        """`memory` is uint8 [a multiple of `NUM_CHUNKS`]; `free` is called once no reader uses it."""
        self._chunks = memory.view(NUM_CHUNKS, -1)
        self._readers = readers
        self._free = free
        self._num_unread = dict.fromkeys(readers, 0)
        self._num_written = 0

    def move(self, buffer: torch.Tensor) -> None:
        """Write `buffer`. Returns when all of it is written; readers may still read the last chunks."""
        for part in _parts(buffer, self._chunks.shape[1]):
            for reader in self._readers:
                while self._num_unread[reader] == NUM_CHUNKS:
                    _take(reader, "a reader")
                    self._num_unread[reader] -= 1
            _copy(part, self._chunks[self._num_written % NUM_CHUNKS, : part.numel()])
            self._num_written += 1
            for reader in self._readers:
                reader.sendall(WRITTEN)
                self._num_unread[reader] += 1

    def leave(self) -> None:
        """Make readers fail that wait for a chunk."""
        _shut(self._readers, socket.SHUT_WR)

    def release(self) -> None:
        """After `leave`: wait until all readers have left, because memory that is in use elsewhere may not be freed."""
        for reader in self._readers:
            with reader, suppress(ConnectionError):  # it has died
                while reader.recv(1):
                    pass
        self._free()


class RingReader:
    """A reader's end."""

    def __init__(self, memory: torch.Tensor, writer: socket.socket, free: Callable[[], None]) -> None:
        self._chunks = memory.view(NUM_CHUNKS, -1)
        self._writer = writer
        self._free = free
        self._num_read = 0

    def move(self, buffer: torch.Tensor) -> None:
        for part in _parts(buffer, self._chunks.shape[1]):
            _take(self._writer, "the writer")
            _copy(self._chunks[self._num_read % NUM_CHUNKS, : part.numel()], part)
            self._num_read += 1
            self._writer.sendall(READ)

    def leave(self) -> None:
        """Make a `move` fail that waits for the writer."""
        _shut([self._writer], socket.SHUT_RD)

    def release(self) -> None:
        """After `leave`: the writer learns that the memory is not used any more."""
        with self._writer:
            self._free()


def share(
    listening: socket.socket, ways: Mapping[int, Way], device: torch.device, timeout_s: float
) -> tuple[RingWriter, ...]:
    """Waits for the readers, by their ranks, and makes a ring for those on this GPU and one for the others. A reader on
    this GPU that cannot open the handle reads host memory."""
    readers = _accepted(listening, ways.keys(), timeout_s)
    on_host = [readers[rank] for rank, way in ways.items() if way == "host"]
    on_device = [readers[rank] for rank, way in ways.items() if way == "device"]
    rings = []
    try:
        if on_device:
            shared = create(NUM_CHUNKS * CHUNK_BYTES["cuda"], device)
            refusals = [reader for reader in on_device if not _opens(reader, shared.handle)]
            on_host += refusals
            opened = [reader for reader in on_device if reader not in refusals]
            if opened:
                rings.append(RingWriter(shared.tensor, opened, shared.free))
            else:
                shared.free()
        if on_host:
            descriptor = os.memfd_create("mobula-weights")
            try:
                os.ftruncate(descriptor, NUM_CHUNKS * CHUNK_BYTES["cpu"])
                for reader in on_host:
                    socket.send_fds(reader, [HOST_MEMORY], [descriptor])
                rings.append(RingWriter(_mapped(descriptor), on_host, lambda: None))
            finally:
                os.close(descriptor)
        for reader in readers.values():
            reader.settimeout(None)
    except BaseException:
        for reader in readers.values():
            reader.close()
        raise
    return tuple(rings)


def _opens(reader: socket.socket, handle: bytes) -> bool:
    reader.sendall(DEVICE_MEMORY + handle)
    answer = reader.recv(1024)
    if answer != ACCEPTED:
        _logger.warning("an engine on the learner's GPU reads host memory: %s", answer.decode() or "it has died")
    return answer == ACCEPTED


def join(address: str, rank: int, device: torch.device, timeout_s: float) -> RingReader:
    """Connects to the writer at `address` as `rank`."""
    writer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        writer.settimeout(timeout_s)
        writer.connect(address)
        writer.sendall(RANK.pack(rank))
        message, descriptors, _, _ = socket.recv_fds(writer, 1024, 1)
        if message.startswith(DEVICE_MEMORY):
            try:
                shared = open_handle(message[1:], NUM_CHUNKS * CHUNK_BYTES["cuda"], device)
            except OSError as error:
                writer.sendall(str(error).encode()[:1024])
                message, descriptors, _, _ = socket.recv_fds(writer, 1024, 1)
            else:
                writer.sendall(ACCEPTED)
                writer.settimeout(None)
                return RingReader(shared.tensor, writer, shared.free)
        if not descriptors:
            raise ConnectionResetError(f"the writer sent {message!r} and no memory")
        try:
            memory = _mapped(descriptors[0])
        finally:
            os.close(descriptors[0])
        writer.settimeout(None)
        return RingReader(memory, writer, lambda: None)
    except BaseException:
        writer.close()
        raise


def _accepted(listening: socket.socket, ranks: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
    deadline = time.monotonic() + timeout_s
    readers: dict[int, socket.socket] = {}
    try:
        while readers.keys() != set(ranks):
            listening.settimeout(max(0.001, deadline - time.monotonic()))
            reader, _ = listening.accept()
            _, user, _ = PEER.unpack(reader.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
            if user != os.geteuid():  # an address in the abstract namespace has no permissions
                reader.close()
                continue
            reader.settimeout(timeout_s)
            readers[RANK.unpack(reader.recv(RANK.size))[0]] = reader
    except (OSError, struct.error) as error:
        for reader in readers.values():
            reader.close()
        raise ConnectionError(f"ranks {sorted(set(ranks) - readers.keys())} did not connect: {error}") from error
    return readers


def _mapped(descriptor: int) -> torch.Tensor:
    """The memory of a descriptor; it is unmapped with the last tensor that uses it."""
    return torch.frombuffer(mmap.mmap(descriptor, NUM_CHUNKS * CHUNK_BYTES["cpu"]), dtype=torch.uint8)


def _parts(buffer: torch.Tensor, num_bytes: int) -> Iterator[torch.Tensor]:
    yield from buffer.detach().view(-1).view(torch.uint8).split(num_bytes)


@torch.inference_mode()  # the buffer may be a parameter, or memory that was made in this mode
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies on the current stream, and waits: the next process reads on a stream of its own."""
    target.copy_(source)
    for tensor in (source, target):
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def _take(connection: socket.socket, who: str) -> None:
    if not connection.recv(1):
        raise ConnectionResetError(f"{who} of the shared memory has died or left")


def _shut(connections: Sequence[socket.socket], how: int) -> None:
    for connection in connections:
        with suppress(OSError):  # the other end is gone
            connection.shutdown(how)
