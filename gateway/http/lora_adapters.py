"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, for administrators."""

from __future__ import annotations

from aiohttp import web

from ...core.request.json_fields import STRING
from .generate.request_fields import Body
from .protocol.app_state import APP_STATE

ROUTES = web.RouteTableDef()

LOAD = Body({"lora_name": STRING, "lora_path": STRING}, ("lora_name", "lora_path"), {})
UNLOAD = Body({"lora_name": STRING}, ("lora_name",), {})


@ROUTES.post("/v1/load_lora_adapter")
async def load(request: web.Request) -> web.Response:
    """Serve a LoRA adapter under a name, from a folder on every engine's host."""
    found = await LOAD.read(request)
    name = found["lora_name"]
    await request.app[APP_STATE].door.adapters.load(name, found["lora_path"])
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


@ROUTES.post("/v1/unload_lora_adapter")
async def unload(request: web.Request) -> web.Response:
    """Stop serving a LoRA adapter; running requests are completed."""
    name = (await UNLOAD.read(request))["lora_name"]
    request.app[APP_STATE].door.adapters.unload(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
