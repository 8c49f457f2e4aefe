"""The agent, its configuration and its handles, with the names, arguments and return values of NIXL's Python interface."""

from __future__ import annotations

import atexit
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Optional, TypeVar, Union, cast

import numpy as np
import numpy.typing as npt

from .._errors import ForkedError
from .._kvferry import NixlAgent, NixlList, NixlTransfer
from . import _bindings as nixlBind
from ._descs import Descs, reg_descs, xfer_descs
from ._errors import nixlInvalidParamError, nixlNotFoundError, nixlNotPostedError, nixlNotSupportedError, nixlNoTelemetryError

logger = logging.getLogger("kvferry.nixl")

DEFAULT_COMM_PORT = nixlBind.DEFAULT_COMM_PORT

BACKEND = "UCX"
"""The only backend."""

PARAMS = {"num_threads": "1", "ucx_error_handling_mode": "peer"}
"""Parameters of the backend, and their defaults."""

ENTRIES_MAX = 1 << 28
"""Descriptors of one list at most: 6 GiB of them."""

nixl_backend_handle = int

Message = Union[bytes, str]
Name = Union[str, bytes]
Indices = Union[Sequence[int], npt.NDArray[Any]]
L = TypeVar("L", nixlBind.nixlXferDList, nixlBind.nixlRegDList)


class nixl_thread_sync_t(Enum):
    """How an agent is shared by threads. Here every agent may be used by any thread, whatever is asked for."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = NIXL_THREAD_SYNC_NONE


class nixl_agent_config:
    """How an agent is set up.

    The arguments before ``*`` are NIXL's. ``enable_prog_thread``, ``capture_telemetry`` and ``sync_mode`` are accepted and change
    nothing: there always is a progress thread, which sleeps when there is nothing to do, every transfer has telemetry, and any
    thread may call. ``num_threads`` is the number of threads that copy. Those behind ``*`` are this library's, times in seconds:

    - ``patience``: how long a peer may show no sign of life before what is under way with it fails (30).
    - ``transfer_deadline``: how long a transfer may take in all before it is cancelled (no limit).
    - ``release_timeout``: how long releasing an active transfer, and deregistering memory, may wait for it to be quiet.
    - ``connect_timeout``: how long :meth:`nixl_agent.make_connection` and the exchange of metadata may take.
    - ``cuda_device``: the GPU whose memory may be registered. By default that of the first memory of a GPU that is registered,
      or torch's current device if torch uses CUDA by then.
    - ``transports``, ``route``: as ``UCX_TLS``, and the one way that transfers take; for tests and measurements.
    - ``linger``: how long the progress thread looks on for more before it sleeps.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = (BACKEND,),
        sync_mode: Optional[nixl_thread_sync_t] = None,
        *,
        patience: Optional[float] = None,
        transfer_deadline: Optional[float] = None,
        release_timeout: float = 30.0,
        connect_timeout: float = 30.0,
        cuda_device: Optional[int] = None,
        listen_host: str = "0.0.0.0",
        transports: Optional[str] = None,
        route: Optional[str] = None,
        linger: Optional[float] = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode is a nixl_thread_sync_t, not a {type(sync_mode).__name__}")
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.backends = list(backends)
        self.sync_mode = sync_mode
        self.patience = patience
        self.transfer_deadline = transfer_deadline
        self.release_timeout = release_timeout
        self.connect_timeout = connect_timeout
        self.cuda_device = cuda_device
        self.listen_host = listen_host
        self.transports = transports
        self.route = route
        self.linger = linger


class nixl_prepped_dlist_handle:
    """A prepared list of descriptors. Released by :meth:`release` or when it is collected."""

    __slots__ = ("_native",)

    def __init__(self, native: NixlList) -> None:
        self._native: Optional[NixlList] = native

    def native(self) -> NixlList:
        if self._native is None:
            raise nixlInvalidParamError("the list has been released", "Released")
        return self._native

    def release(self) -> None:
        self._native = None

    def __repr__(self) -> str:
        return f"<nixl_prepped_dlist_handle {'released' if self._native is None else f'of {len(self._native)}'}>"


class nixl_xfer_handle:
    """A transfer.

    :meth:`release` cancels it if it is active and returns when nothing of it reads or writes memory of this process any more. One
    that is collected while it is active is cancelled without waiting; the agent keeps its memory registered until it is quiet.
    """

    __slots__ = ("_native", "_timeout")

    def __init__(self, native: NixlTransfer, timeout: float) -> None:
        self._native: Optional[NixlTransfer] = native
        self._timeout = timeout

    def native(self) -> NixlTransfer:
        if self._native is None:
            raise nixlInvalidParamError("the transfer has been released", "Released")
        return self._native

    def release(self, timeout: Optional[float] = None) -> None:
        """Raises :class:`nixlRepostActiveError` if it is not quiet after ``timeout`` seconds. It can be called again."""
        if self._native is not None:
            self._native.quiet(self._timeout if timeout is None else timeout)
            self._native = None

    def __repr__(self) -> str:
        return f"<nixl_xfer_handle {'released' if self._native is None else f'of {self._native.nbytes} B'}>"


class nixl_agent:
    """A named agent: registers memory, loads other agents' metadata, moves bytes to and from their memory and notifies them.

    Any thread may call. UCX is opened, and the agent's threads are started, when the first memory is registered or something else
    needs them: by then it is known which GPU there is to be. Agents do not survive ``fork``.
    """

    def __init__(
        self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None, instantiate_all: bool = False
    ) -> None:
        if not isinstance(agent_name, str):
            raise TypeError(f"the name of an agent is text, not a {type(agent_name).__name__}")
        if not agent_name:
            raise ValueError("an agent has to have a name")
        self.name = agent_name
        self._config = nixl_conf or nixl_agent_config()
        self._native: Optional[NixlAgent] = None
        self._starting = threading.Lock()
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = [BACKEND]
        self.plugin_b_options = {BACKEND: dict(PARAMS)}
        self.plugin_mem_types = {BACKEND: ["DRAM_SEG", "VRAM_SEG"]}
        self.nixl_mems = dict(MEM_TYPES)
        self.nixl_ops = {"WRITE": nixlBind.NIXL_WRITE, "READ": nixlBind.NIXL_READ}
        for backend in self.plugin_list if instantiate_all and nixl_conf is None else self._config.backends:
            if backend in self.plugin_list:
                threads = self._config.num_threads
                self.create_backend(backend, {"num_threads": str(threads)} if threads > 0 else {})
            else:
                logger.warning("there is no backend %s here, which moves everything by %s", backend, BACKEND)
        if self._config.enable_listen:
            self._agent()

    def _agent(self, gpu: Optional[int] = None) -> NixlAgent:
        """The agent's threads, started if they have not been. ``gpu``: whose memory is about to be registered."""
        if self._native is not None:
            return self._native
        config = self._config
        with self._starting:
            if self._native is None:
                if config.cuda_device is not None:
                    gpu = config.cuda_device
                elif gpu is None:
                    gpu = _torch_device()
                threads = int(self.backend_options.get(BACKEND, {}).get("num_threads", "0"))
                self._native = NixlAgent(
                    self.name,
                    gpu=gpu,
                    listen=(config.listen_host, config.port) if config.enable_listen else None,
                    patience=config.patience,
                    transfer_deadline=config.transfer_deadline,
                    transports=config.transports,
                    route=config.route,
                    linger=config.linger,
                    copy_threads=threads or None,
                )
                _agents.add(self)
                logger.info("agent %s has started, with UCX %s", self.name, self._native.ucx_version)
        return self._native

    def close(self) -> None:
        """Gives up what is under way, takes leave of the peers and stops the threads."""
        if self._native is not None:
            self._native.close()

    # Backends: there is one.

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return self.plugin_mem_types.get(backend, [])

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return self.plugin_b_options.get(backend, {})

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: Optional[dict[str, str]] = None) -> None:
        """Raises :class:`nixlNotFoundError` for another backend than UCX, and :class:`nixlInvalidParamError` for one that there is
        already. Parameters that there are not here are ignored."""
        if backend not in self.plugin_list:
            raise nixlNotFoundError(f"there is no backend {backend!r}, only {BACKEND!r}", "Backend")
        if backend in self.backends:
            raise nixlInvalidParamError(f"there is a backend {backend!r} already", "Backend")
        params = dict(PARAMS)
        for key, value in (initParams or {}).items():
            if key == "num_threads":
                params[key] = str(max(1, int(value)))
            elif params.get(key) != str(value):
                logger.warning("backend %s has no parameter %s=%s here", backend, key, value)
        self.backends[backend] = 1
        self.backend_mems[backend] = self.plugin_mem_types[backend]
        self.backend_options[backend] = params

    def _check(self, backends: Sequence[str]) -> None:
        for backend in backends:
            self.backends[backend]

    # Memory.

    def get_reg_descs(self, descs: Descs, mem_type: Optional[str] = None) -> nixlBind.nixlRegDList:
        """Descriptors of memory to register: of a tensor or an array, a list of them, an array ``[N, 3]``, or tuples of four
        with ``mem_type``. ``None``, and a message in the log, for something else."""
        return cast(nixlBind.nixlRegDList, reg_descs(descs, self._mem_type(mem_type)))

    def get_xfer_descs(self, descs: Descs, mem_type: Optional[str] = None) -> nixlBind.nixlXferDList:
        """Descriptors of one side of a transfer, likewise, of tuples of three."""
        return cast(nixlBind.nixlXferDList, xfer_descs(descs, self._mem_type(mem_type)))

    def _mem_type(self, name: Optional[str]) -> Optional[nixlBind.nixl_mem_t]:
        return None if name is None else self.nixl_mems[name]

    def register_memory(
        self, reg_list: Descs, mem_type: Optional[str] = None, backends: Sequence[str] = ()
    ) -> nixlBind.nixlRegDList:
        """Registers all of it, or raises and registers none. Tensors and arrays are kept alive until their memory is
        deregistered; memory that is given by address is the caller's to keep until then."""
        self._check(backends)
        descs = _given(self.get_reg_descs(reg_list, mem_type))
        on_gpu = _on_gpu(descs.getType())
        gpu = int(descs.rows()[0, 2]) if on_gpu and descs.descCount() else None
        descs.registrations.append(self._agent(gpu).register(on_gpu, descs.rows().tobytes(), descs.owner))
        return descs

    def deregister_memory(self, dereg_list: nixlBind.nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Waits for transfers that use it. When it returns nothing reads or writes the memory for this agent any more.

        Of memory that was registered several times, what ends is the registration that returned this very list, or, if it is
        another list of the same memory, the latest.

        Raises :class:`nixlRepostActiveError` for memory that is still in use after ``release_timeout``. The rest of the list is
        deregistered then, and another call waits on."""
        self._check(backends)
        descs, agent = _listed(dereg_list, nixlBind.nixlRegDList), self._agent()
        on_gpu, rows = _on_gpu(descs.getType()), descs.rows().tobytes()
        registration = descs.registrations.pop() if descs.registrations else agent.registration(on_gpu, rows)
        try:
            agent.deregister(on_gpu, rows, registration, self._config.release_timeout)
        except BaseException:
            descs.registrations.append(registration)  # what is left of it
            raise

    def query_memory(
        self, reg_list: Descs, backend: str, mem_type: Optional[str] = None
    ) -> list[Optional[dict[str, str]]]:
        """For each descriptor ``{"registered": "true"}`` if all of it is registered, else ``None``."""
        descs = _given(self.get_reg_descs(reg_list, mem_type))
        if backend not in self.backends:
            raise ValueError(f"there is no backend {backend!r}, only {list(self.backends)}")
        found = self._agent().is_registered(_on_gpu(descs.getType()), descs.rows().tobytes())
        return [{"registered": "true"} if is_registered else None for is_registered in found]

    # Other agents.

    def get_agent_metadata(self) -> bytes:
        return self._agent().metadata()

    def get_partial_agent_metadata(
        self, descs: nixlBind.nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        self._check(backends)
        descs = _listed(descs, nixlBind.nixlRegDList)
        return self._agent().metadata_of(_on_gpu(descs.getType()), descs.rows().tobytes(), inc_conn_info)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Returns the agent's name as bytes, as NIXL does. Everything that takes a name takes it as ``str`` too.

        An agent of that name that has started again since is taken in its place.
        """
        return self._agent().add_remote(_bytes(metadata)).encode()

    def remove_remote_agent(self, agent: Name) -> None:
        """Gives up what is under way with it. Of no effect for one that is not known."""
        try:
            self._agent().remove_remote(_text(agent))
        except nixlNotFoundError as error:
            logger.debug("%s", error)

    def check_remote_metadata(self, agent: Name, descs: Optional[nixlBind.nixlXferDList] = None) -> bool:
        descs = nixlBind.nixlXferDList(nixlBind.DRAM_SEG) if descs is None else _listed(descs, nixlBind.nixlXferDList)
        on_gpu, rows = _on_gpu(descs.getType()), descs.rows().tobytes()
        return self._agent().knows(_text(agent), on_gpu, rows)

    def make_connection(self, remote_agent: Name, backends: Sequence[str] = (), timeout: Optional[float] = None) -> None:
        """Connects, and waits until the other agent has answered, for ``timeout`` seconds at most."""
        self._check(backends)
        self._agent().connect(_text(remote_agent), self._config.connect_timeout if timeout is None else timeout)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Gives the metadata to the agent that listens there. Does not wait; what goes wrong is logged."""
        self._exchange(ip_addr, lambda agent, timeout: agent.send_metadata(ip_addr, port, None, timeout))

    def send_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        metadata = self.get_partial_agent_metadata(descs, inc_conn_info, backends)
        self._exchange(ip_addr, lambda agent, timeout: agent.send_metadata(ip_addr, port, metadata, timeout))

    def fetch_remote_metadata(
        self, remote_agent: Name, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Asks the agent that listens there for its metadata. Does not wait: see :meth:`check_remote_metadata`."""
        name = _text(remote_agent) or None
        self._exchange(ip_addr, lambda agent, timeout: agent.fetch_metadata(ip_addr, port, name, timeout))

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Tells the agent that listens there to remove this one."""
        self._exchange(ip_addr, lambda agent, timeout: agent.withdraw_metadata(ip_addr, port, timeout))

    def _exchange(self, ip_addr: str, call: Callable[[NixlAgent, float], object]) -> None:
        if not ip_addr:
            raise nixlNotSupportedError("there is no central server for metadata: name the peer's address", "Unsupported")
        agent, timeout = self._agent(), self._config.connect_timeout

        def exchange() -> None:
            try:
                call(agent, timeout)
            except Exception as error:
                logger.error("metadata was not exchanged with %s: %s", ip_addr, error)

        threading.Thread(target=exchange, name="kvferry-metadata", daemon=True).start()

    # Transfers.

    def prep_xfer_dlist(
        self, agent_name: Name, xfer_list: Descs, mem_type: Optional[str] = None, backends: Sequence[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Looks the descriptors up in memory of this agent (``"NIXL_INIT_AGENT"`` or ``""``) or of a remote one, which is
        connected to if it is not. An array ``[N, 5]`` of (address, length, device, stride, count) stands for ``count``
        descriptors a row."""
        self._check(backends)
        name = _text(agent_name)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("an array [N, 5] says nothing of its memory: mem_type does")
            xfer_list = _unrolled(xfer_list)
        descs = _given(self.get_xfer_descs(xfer_list, mem_type))
        local = name in ("", "NIXL_INIT_AGENT")
        native = self._agent().prepare(None if local else name, _on_gpu(descs.getType()), descs.rows().tobytes())
        return nixl_prepped_dlist_handle(native)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Indices,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Indices,
        notif_msg: Message = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Pairs entry ``local_indices[i]`` of the one list with ``remote_indices[i]`` of the other."""
        self._check(backends)
        write = self.nixl_ops[operation] == nixlBind.NIXL_WRITE
        local, remote = local_xfer_side.native(), remote_xfer_side.native()
        here, there = _index_bytes(local_indices), _index_bytes(remote_indices)
        native = self._agent().make(write, local, here, remote, there, _bytes(notif_msg))
        return nixl_xfer_handle(native, self._config.release_timeout)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlBind.nixlXferDList,
        remote_descs: nixlBind.nixlXferDList,
        remote_agent: Name,
        notif_msg: Message = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """Pairs the descriptors of two lists that are used once."""
        write = self.nixl_ops[operation] == nixlBind.NIXL_WRITE
        local = self.prep_xfer_dlist("", local_descs, backends=backends).native()
        remote = self.prep_xfer_dlist(remote_agent, remote_descs, backends=backends).native()
        native = self._agent().make(write, local, None, remote, None, _bytes(notif_msg))
        return nixl_xfer_handle(native, self._config.release_timeout)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: Message = b"") -> str:
        """Posts it: ``"PROC"``, or ``"DONE"`` if it is over already. With ``notif_msg``, this post and later ones end with that."""
        state = handle.native().post(notif_msg if isinstance(notif_msg, bytes) else _bytes(notif_msg))
        return "PROC" if state is None else state

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """``"PROC"`` or ``"DONE"``. Raises what it has failed with, again and again, until it is posted anew."""
        state = handle.native().state()
        if state is None:
            raise nixlNotPostedError("the transfer has not been posted", "NotPosted")
        return state

    def wait_xfer(self, handle: nixl_xfer_handle, timeout: float) -> str:
        """As :meth:`check_xfer_state`, and waits for the end without the interpreter. NIXL has no such method."""
        state = handle.native().wait(timeout)
        if state is None:
            raise nixlNotPostedError("the transfer has not been posted", "NotPosted")
        return state

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        """Of the last post that has ended, whether or not ``capture_telemetry`` was asked for."""
        told = handle.native().telemetry()
        if told is None and not handle.native().posted:
            raise nixlNotPostedError("the transfer has not been posted", "NotPosted")
        if told is None:
            raise nixlNoTelemetryError("the transfer has not ended", "NoTelemetry")
        start, post, whole, total, count, route = told
        return nixlBind.nixlXferTelemetry(start, round(post), round(whole), total, count, *(route or (None, None)))

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        handle.native()
        return BACKEND

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Microseconds, the error of that, and the method: ``"UNKNOWN"``, there is no estimate."""
        req_handle.native()
        return 0, 0, "UNKNOWN"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Cancels it if it is active, and waits until nothing of it moves: then its memory is the caller's again."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    def prep_mem_view(self, dlist: Any, *, backends: Optional[Sequence[str]] = None) -> int:
        raise nixlNotSupportedError("there are no memory views for kernels here", "Unsupported")

    def release_mem_view(self, mvh: int) -> None:
        raise nixlNotSupportedError("there are no memory views for kernels here", "Unsupported")

    def get_remote_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        raise nixlNotSupportedError("there are no memory views for kernels here", "Unsupported")

    # Notifications.

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What other agents have said since the last call, by their names. The data that a notification speaks of is there."""
        if backends:
            self._check(backends)
        agent = self._native
        return {} if agent is None else agent.notifications({})

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """As :meth:`get_new_notifs`, added to what has not been handled."""
        if backends:
            self._check(backends)
        if self._native is not None:
            self._native.notifications(self.notifs)
        return self.notifs

    def check_remote_xfer_done(
        self, remote_agent_name: Name, lookup_tag: Message, backends: Sequence[str] = (), tag_is_prefix: bool = True
    ) -> bool:
        """Whether the agent has said something that begins with the tag, or has it anywhere. Takes the first such out."""
        tag = _bytes(lookup_tag)
        heard = self.update_notifs(backends).get(_text(remote_agent_name), [])
        for at, message in enumerate(heard):
            if message.startswith(tag) if tag_is_prefix else tag in message:
                del heard[at]
                return True
        return False

    def send_notif(self, remote_agent_name: Name, notif_msg: Message, backend: Optional[str] = None) -> None:
        """Says something that goes with no transfer, and is not ordered against any."""
        self._check([backend] if backend else ())
        self._agent().send_notification(_text(remote_agent_name), _bytes(notif_msg))

    # Descriptors as bytes.

    def get_serialized_descs(self, descs: Any) -> bytes:
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Runs what the bytes say, as unpickling does: only for those of a peer that is trusted."""
        return pickle.loads(serialized_descs)


MEM_TYPES = {
    "DRAM": nixlBind.DRAM_SEG,
    "VRAM": nixlBind.VRAM_SEG,
    "FILE": nixlBind.FILE_SEG,
    "BLOCK": nixlBind.BLK_SEG,
    "OBJ": nixlBind.OBJ_SEG,
    "cpu": nixlBind.DRAM_SEG,
    "cuda": nixlBind.VRAM_SEG,
}


def _on_gpu(kind: nixlBind.nixl_mem_t) -> bool:
    if kind not in (nixlBind.DRAM_SEG, nixlBind.VRAM_SEG):
        raise nixlNotSupportedError(f"there is no {kind.name} here, only DRAM and VRAM", "Unsupported")
    return kind == nixlBind.VRAM_SEG


def _given(descs: L) -> L:
    """The list that was made of what a caller has handed over, if one could be."""
    if descs is None:
        raise nixlInvalidParamError("these are no descriptors: the log says why", "Descriptors")
    return descs


def _listed(descs: Any, kind: type[L]) -> L:
    """The list, which has to be one already."""
    if not isinstance(descs, kind):
        raise TypeError(f"this takes a {kind.__name__}, not a {type(descs).__name__}")
    return descs


def _text(name: Name) -> str:
    if not isinstance(name, (str, bytes)):
        raise TypeError(f"the name of an agent is text or bytes, not a {type(name).__name__}")
    return name.decode() if isinstance(name, bytes) else name


def _bytes(message: Message) -> bytes:
    if isinstance(message, str):
        return message.encode()
    if not isinstance(message, (bytes, bytearray, memoryview)):
        # Of a number, bytes() would make as many zeroes.
        raise TypeError(f"bytes or text are wanted, not a {type(message).__name__}")
    return bytes(message)


def _index_bytes(indices: Indices) -> tuple[bytes, int]:
    """The bytes of an array of signed integers, and those of one."""
    array = indices if isinstance(indices, np.ndarray) else np.asarray(indices)
    if array.size == 0:
        array = array.astype(np.int64)  # of nothing, numpy makes floats
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise nixlInvalidParamError(f"indices are one row of integers, not {list(array.shape)} of {array.dtype}", "Indices")
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise nixlInvalidParamError(f"place {array.argmin()} of the indices: {array.min()} is below 0", "Indices")
    if array.dtype not in (np.int32, np.int64):
        array = array.astype(np.int64)
    return array.tobytes(), array.itemsize


def _unrolled(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Each row of (address, length, device, stride, count) as ``count`` rows of (address, length, device)."""
    if rows.dtype.kind not in "iu":
        raise ValueError(f"descriptors are an array [N, 5] of integers, not of {rows.dtype}")
    rows = np.ascontiguousarray(rows, dtype=np.uint64)
    if rows[:, 4].max(initial=0) > ENTRIES_MAX or int(rows[:, 4].sum()) > ENTRIES_MAX:
        raise nixlInvalidParamError(f"more than {ENTRIES_MAX} descriptors in one list", "TooMany")
    counts = rows[:, 4].astype(np.int64)
    descs = np.repeat(rows[:, :3], counts, axis=0)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    steps = (np.arange(len(descs)) - starts).astype(np.uint64)
    descs[:, 0] += steps * np.repeat(rows[:, 3], counts)
    return descs


def _torch_device() -> Optional[int]:
    """torch's current GPU, if torch is there and uses one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    device: int = torch.cuda.current_device()
    return device


_agents: weakref.WeakSet[nixl_agent] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """An interpreter that ends takes UCX down under threads that still run."""
    for agent in list(_agents):
        try:
            agent.close()
        except ForkedError:
            pass  # not this process's to close
