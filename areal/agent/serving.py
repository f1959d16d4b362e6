"""The session server of a process: its socket, its routes, and the pool that runs the agents."""

from pathlib import Path

import orjson
from aiohttp import web

from areal.agent.directory import Sessions
from areal.agent.processes import AgentPool
from areal.agent.session_routes import SessionServer
from areal.agent.turn_journal import TurnJournal
from areal.api.config import AgentConfig
from areal.data.tokenizer import Tokenizer
from areal.observe.http_log import HttpLogger
from areal.observe.log import get_logger
from areal.system.device import cpu_count
from areal.system.durable import write_atomic
from areal.system.network import Host, http_address, listen, new_token, run_token
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths

_log = get_logger(__name__)
_TEXT_MB, _IMAGE_MB = 16, 4
"""Limits of a request without agent.max_body_mb, and what each of its images adds."""


class AgentServices:
    """What all agents of a process share. It starts with the first session, on the loop that runs then."""

    def __init__(self, config: AgentConfig, tokenizer: Tokenizer, *, max_images: int = 0) -> None:
        """`max_images`: of a request; 0 = the policy takes none."""
        self._config = config
        self._max_body_mb = config.max_body_mb or _TEXT_MB + _IMAGE_MB * max_images
        self._tokenizer = tokenizer
        self.sessions = Sessions()
        workers = 0 if config.inline else config.workers or max(1, cpu_count() // 2)
        self._num_workers = workers
        self._pool: AgentPool | None = None
        self._runner: web.AppRunner | None = None
        self._http_log: HttpLogger | None = None
        self.journal: TurnJournal | None = None
        """Of the run of this process; None without a run."""
        self.base_url = ""
        """Of the running server, without /v1."""

    @property
    def pool(self) -> AgentPool:
        if self._pool is None:
            self._pool = AgentPool(num_workers=self._num_workers, sessions_per_worker=self._config.sessions_per_worker)
        return self._pool

    async def start(self) -> None:
        """Listen. Does nothing when the server runs."""
        if self._runner is not None:
            return
        context = ProcessContext.from_env()
        token = run_token() or new_token()
        host = Host(bind=self._config.host, advertise=self._config.host) if self._config.host else Host()
        bound = listen(host, token, self._config.port)
        server = SessionServer(
            self.sessions,
            admin_token=token,
            token_text=lambda token_id: self._tokenizer.decode([token_id]),
            host=host,
            max_body_mb=self._max_body_mb,
        )
        self._http_log = HttpLogger()
        self._runner = server.runner(self._http_log)
        self.base_url = http_address(bound, host.advertise)
        if context is not None:
            paths = RunPaths(Path(context.run_dir))
            self.journal = TurnJournal(paths.turns)
            write_atomic(paths.sessions, orjson.dumps({"base_url": self.base_url}))
        await self._runner.setup()  # from here on, other callers may run: everything else is set
        await web.SockSite(self._runner, bound).start()
        _log.info("sessions are served at %s", self.base_url)

    async def aclose(self) -> None:
        """End the agents, then the server."""
        if self._pool is not None:
            await self._pool.aclose()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http_log is not None:
            self._http_log.close()
        if self.journal is not None:
            await self.journal.aclose()
