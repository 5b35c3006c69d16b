"""A client that sends one request after the other, for tests of single requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from head_world import F32, World
from session_noise import put

from regrow.errors import Code
from regrow.wire.schema import proxy
from regrow.wire.shardings import Sharding


class Client:
    """Sends one request after the other, and reads arrays back."""

    def __init__(self, world: World, **init_data: Any) -> None:
        self.world = world
        self.session, self.responses = world.session(**init_data)
        self.requests = 0

    def send(self, name: str, **fields: Any) -> Any:
        """Sends a request; its body, to be filled in before, is made of `fields`."""
        request = proxy.IfrtRequest()
        body = getattr(request, name)
        body.SetInParent()
        for field, value in fields.items():
            _set(body, field, value)
        return self.give(request)

    def give(self, request: Any) -> Any:
        self.requests += 1
        request.request_metadata.op_id = self.requests
        self.session.request(request.SerializeToString())
        return request

    async def ask(self, name: str, **fields: Any) -> Any:
        """The answer to a request."""
        self.send(name, **fields)
        return await self.answer()

    async def answer(self) -> Any:
        await self.world.settle()
        self.session._release()
        (found,) = [r for r in self.responses if r.response_metadata.op_id == self.requests]
        return found

    async def refusal(self, name: str, **fields: Any) -> tuple[Code, str]:
        status = (await self.ask(name, **fields)).response_metadata.status
        return Code(status.code), status.message

    def put(self, handle: int, value: Any, sharding: Sharding) -> None:
        value = np.asarray(value, np.float32)
        self.session.store_begin(500, value.nbytes)[:] = value.tobytes()
        self.session.store_end(500)
        self.give(put(0, handle, 500, value.shape, sharding))

    async def get(self, handle: int) -> Any:
        """A single-device array, or the code and text of its error."""
        array = self.session._tables.arrays[handle]
        response = await self.ask(
            "copy_to_host_buffer_request", array_handle=handle, host_buffer_handle=600
        )
        status = response.response_metadata.status
        if status.code:
            return Code(status.code), status.message
        view = self.session.lookup(600)
        assert view is not None
        value = np.frombuffer(bytes(view), np.float32).reshape(array.shape)  # type: ignore[union-attr]
        self.session.delete(600)
        return value.tolist()

    async def shards(self, handle: int) -> list[Any]:
        """The shards of an array."""
        count = len(self.session._tables.array(handle).sharding.devices)
        handles = list(range(700, 700 + count))
        response = await self.ask(
            "disassemble_into_single_device_arrays_request",
            array_handle=handle,
            result_handles=handles,
        )
        assert not response.response_metadata.status.code
        return [await self.get(each) for each in handles]


def _set(body: Any, field: str, value: Any) -> None:
    if isinstance(value, Sharding):
        getattr(body, field).ParseFromString(value.serialized)
    elif field in ("shape", "array_specs"):
        _set_shapes(body, field, value)
    elif isinstance(value, list | tuple):
        getattr(body, field).extend(value)
    else:
        setattr(body, field, value)


def _set_shapes(body: Any, field: str, value: Any) -> None:
    if field == "shape":
        body.shape.dims.extend(value)
        return
    for shape, sharding in value:
        spec = body.array_specs.add()
        spec.dtype.kind = F32
        spec.shape.dims.extend(shape)
        spec.sharding.ParseFromString(sharding.serialized)
