"""Earlier versions of the policy that the servers hold as LoRA adapters, beside the current one."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError
from areal.fleet.replica_set import ReplicaSet
from areal.system.durable import publish_folder, writing_folder


class OlderPolicies:
    """Kept in folders of peft. The servers hold those that are in use, and the newest ones that were."""

    def __init__(self, replicas: ReplicaSet, served: Callable[[], WeightUpdate | None]) -> None:
        """`served`: the update that made the version of the fleet."""
        self._replicas, self._served = replicas, served
        self._users: Counter[str] = Counter()
        """By the names of the adapters that the servers hold, also those with 0 users."""
        self._lock = asyncio.Lock()

    async def keep(self, parent: Path) -> Path:
        """See `areal.api.engine.InferenceEngine.keep_policy`."""
        async with self._lock:
            update = self._served()
            if update is None or update.kind != "adapter":
                text = "an older version of the policy is held as an adapter, and the servers do not get adapters alone"
                raise RequestError(f"{text}: set actor.lora and adapter_update_mode=adapter", code="fleet.no_adapters")
            # A version that is made again after a recovery has other weights, and the name of its folder another end.
            folder = parent / f"policy-v{update.version:06d}-{Path(update.path).name.rpartition('-')[2]}"
            if not folder.exists():
                writing = writing_folder(folder)
                await asyncio.to_thread(shutil.copytree, update.path, writing, dirs_exist_ok=True)
                await asyncio.to_thread(publish_folder, writing, folder, sum_up=False)
            return folder

    @asynccontextmanager
    async def held(self, folder: Path) -> AsyncIterator[None]:
        """See `areal.api.engine.InferenceEngine.older_policy`."""
        name = folder.name
        async with self._lock:
            if name not in self._users:
                await self._hold(name, folder)
            self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1

    async def _hold(self, name: str, folder: Path) -> None:
        for unused in [other for other, count in self._users.items() if not count]:
            del self._users[unused]
            await self._replicas.unload_adapter(unused)
        try:
            await self._replicas.load_adapter(name, str(folder))
        except asyncio.CancelledError:
            await self._replicas.unload_adapter(name)
            raise
