"""The trainer's client of the controller: blocking HTTP calls that survive a restart of the controller.

A call waits for the controller by long polling: it is repeated until it has an answer. While no connection succeeds,
the call is repeated for `reconnect_s`, with a new look-up of the address each time. A controller that accepts the
connection but does not answer hangs or is stopped. The launcher kills it after launcher.hang_s and starts it again, so
the call is repeated for `silent_s`; only then does `reconnect_s` start.
"""

import contextlib
import http.client
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import orjson

from areal.api.batch import BatchShare
from areal.api.config import InferenceEngineConfig
from areal.api.data import ProbeScore, ProbeTokens, ScoredRow, TokenScores, WeightUpdate
from areal.api.errors import ArealError, LedgerError, RequestError, ServerUnavailable, WeightSyncError
from areal.api.images import ImageRef
from areal.ledger.event_files import PayloadReader
from areal.observe.log import get_logger
from areal.rollout.control_requests import (
    AttachRequest,
    BackgroundRequest,
    BatchRequest,
    CommittedRequest,
    CompareRequest,
    ConsumedRequest,
    EvaluationRequest,
    FinishRequest,
    PublishRequest,
    ScoreRequest,
    TrainerRequest,
)
from areal.rollout.evaluation import BackgroundEvaluation
from areal.rollout.share_codec import WeightsNeeded, decode_head, decode_share, read_share
from areal.system.discovery import NameRegistry
from areal.system.network import run_token

ANSWER_S = 60.0
"""A live controller answers any call within this time, possibly with "not ready"; well above the long poll."""
SILENT_S = 900.0
"""Well above launcher.hang_s, so that a hung controller is killed before a trainer stops waiting for it."""
RETRY_S = 0.2
FINISH_S = 5.0
CONTROLLER = "controller"

_log = get_logger(__name__)


class CheckpointWanted(Exception):
    """The launcher requests a recovery checkpoint while a batch is not ready."""


class RolloutClient:
    """The connection of one trainer rank. A weight update may be requested from another thread."""

    def __init__(
        self,
        address: str | Callable[[], str],
        *,
        run_id: int = 0,
        token: str,
        ledger: Path | None = None,
        transfer: str = "http",
        reconnect_s: float = 120.0,
        answer_s: float = ANSWER_S,
        silent_s: float = SILENT_S,
        checkpoint_request: Path | None = None,
        server: str = "rollout controller",
    ) -> None:
        """`run_id`: number of earlier starts of the trainer ranks in this launch. `ledger`: the folder from which
        batches are read unless `transfer`, as in rollout.batch_transfer, is http. `checkpoint_request`: while this file
        exists, the wait for a batch is interrupted once. `server`: what errors call the process that is asked."""
        self._address, self._server = address, server
        self._known: str | None = None
        """The address of the last answer. It is looked up again only after a failure: the registry may be down."""
        self._idle: list[http.client.HTTPConnection] = []  # Open connections to it: at most one for each thread.
        self._probe: tuple[int, bytes] | None = None  # Version and answer of the last weight update.
        self._run_id = run_id
        self._token = token
        self._reconnect_s = reconnect_s
        self._answer_s = answer_s
        self._silent_s = silent_s
        self._dp_rank, self._dp_size = 0, 1
        self._transfer = transfer
        self._payloads = PayloadReader(ledger) if ledger is not None and transfer != "http" else None
        self._checkpoint_request = checkpoint_request
        self._interrupted_at = -1  # The train step whose wait was interrupted for a checkpoint.

    @classmethod
    def from_registry(
        cls,
        registry: NameRegistry,
        config: InferenceEngineConfig,
        *,
        run_id: int = 0,
        ledger: Path | None = None,
        checkpoint_request: Path | None = None,
        server: str = "rollout controller",
    ) -> Self:
        """A client that looks up the controller by name, so it also finds a restarted one at another port."""

        def look_up() -> str:
            return orjson.loads(registry.wait(CONTROLLER, config.setup_timeout))["address"]

        return cls(
            look_up,
            run_id=run_id,
            token=run_token(),
            ledger=ledger,
            transfer=config.batch_transfer,
            reconnect_s=config.setup_timeout,
            checkpoint_request=checkpoint_request,
            server=server,
        )

    def attach(self, *, rank: int, world_size: int, dp_rank: int, dp_size: int, step: int, version: int) -> None:
        """Report the position of this rank. Ranks with the same `dp_rank` get the same share of every batch."""
        self._dp_rank, self._dp_size = dp_rank, dp_size
        request = AttachRequest(
            run_id=self._run_id, rank=rank, world_size=world_size, dp_size=dp_size, step=step, version=version
        )
        self._call("/attach", request, "to attach")

    def next_batch(self, step: int) -> BatchShare:
        """The share of this rank of train batch `step`. Blocks until it is ready.

        Raises RequestError when it will never be ready, LedgerError when this host cannot read its payloads and
        rollout.batch_transfer=files, and WeightsNeeded when servers lack the current weights and the trainer
        must publish them again first. Raises CheckpointWanted, once for each step, while the batch is not ready
        and the launcher requests a checkpoint.
        """
        answer = self._batch(step, with_payloads=self._payloads is None)
        if self._payloads is None:
            return decode_share(answer)
        (record, _), _ = decode_head(answer)
        try:
            return read_share(self._payloads, record, dp_rank=self._dp_rank, dp_size=self._dp_size)
        except LedgerError as error:
            if self._transfer == "files":
                raise
            _log.warning("the controller sends the batches from now on, because this host cannot read them: %s", error)
            self._payloads.close()
            self._payloads = None
            return decode_share(self._batch(step, with_payloads=True))

    def _batch(self, step: int, *, with_payloads: bool) -> bytes:
        request = BatchRequest(
            run_id=self._run_id, step=step, dp_rank=self._dp_rank, dp_size=self._dp_size, with_payloads=with_payloads
        )

        def look() -> None:
            is_new = self._interrupted_at != step
            if is_new and self._checkpoint_request is not None and self._checkpoint_request.exists():
                self._interrupted_at = step
                raise CheckpointWanted

        return self._call("/batch", request, f"for batch {step}", not_ready=look)

    def start_update(self, update: WeightUpdate) -> None:
        """Return when the controller has started the update. Raises WeightSyncError when that failed."""
        self._post_update(update, waits=False)

    def publish(self, update: WeightUpdate) -> None:
        """Return when every serving replica holds `update.version`. Raises WeightSyncError when that failed."""
        self._probe = update.version, self._post_update(update, waits=True)

    def _post_update(self, update: WeightUpdate, *, waits: bool) -> bytes:
        try:
            request = PublishRequest(run_id=self._run_id, update=update, waits=waits)
            return self._call("/publish", request, f"to publish version {update.version}")
        except ControllerError as error:
            raise WeightSyncError(str(error), code=error.code) from error

    def probe_tokens(self, version: int) -> ProbeTokens | None:
        """What the servers answered to the canary probe of `version`, to be scored; None without an answer.

        The first time after `publish` it is known from the answer of the controller.
        """
        published, self._probe = self._probe, None
        if published is not None and published[0] == version:
            answer = published[1]
        else:
            answer = self._call(f"/probe?version={version}", None, "for the answer to the canary probe")
        probe = orjson.loads(answer)["probe"]
        if not probe:
            return None
        images = [ImageRef(image["sha256"], tuple(image["grid"])) for image in probe.pop("images")]
        return ProbeTokens(**probe, images=images)

    def compare(self, score: ProbeScore) -> list[str]:
        """Names of the replicas whose answer differs from the trainer's score; they are updated again meanwhile."""
        request = CompareRequest(run_id=self._run_id, score=score)
        answer = self._call("/compare", request, f"to compare version {score.version}")
        return orjson.loads(answer)["differing"]

    def score(self, rows: Sequence[ScoredRow], *, version: int, top_k: int) -> list[TokenScores] | None:
        """Scores of the rows by a server with the weights of `version`; None when there are none in time."""
        request = ScoreRequest(run_id=self._run_id, version=version, rows=list(rows), top_k=top_k)
        scores = orjson.loads(self._call("/score", request, "for the scores of trained tokens"))["scores"]
        return scores and [TokenScores(**row) for row in scores]

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach."""
        return orjson.loads(self._call(f"/replicas?version={version}", None, "for its live replicas"))["live"]

    def consumed(self, step: int, version: int, weights_checksum: str = "", ess: float | None = None) -> None:
        """Batch `step` was trained on and `version` sent. `weights_checksum` (hex): of the actor after it. `ess`:
        effective sample size of the batch as a share of its tokens, None = not measured."""
        request = ConsumedRequest(
            run_id=self._run_id, step=step, version=version, weights_checksum=weights_checksum, ess=ess
        )
        self._call("/consumed", request, f"to report step {step} as consumed")

    def evaluate(self, step: int, mode: str) -> dict[str, float]:
        """Mean reward and more over the held-out rows under the current weights. Blocks until all are scored.

        WeightsNeeded as for a batch.
        """
        request = EvaluationRequest(run_id=self._run_id, step=step, mode=mode)
        return orjson.loads(self._call("/evaluate", request, f"for the {mode} evaluation"))

    def background_evaluation(self, step: int, *, begins: bool = False, waits: bool = False) -> BackgroundEvaluation:
        """The evaluation after `step` by a server that keeps its version. `begins`: it is to begin; `waits`: until it
        has ended."""
        request = BackgroundRequest(run_id=self._run_id, step=step, begins=begins, waits=waits)
        return BackgroundEvaluation(**orjson.loads(self._call("/background", request, "for an evaluation")))

    def committed(self, step: int, path: Path | str) -> None:
        """A recovery checkpoint after `step` train steps is complete."""
        request = CommittedRequest(run_id=self._run_id, step=step, path=str(path))
        self._call("/committed", request, f"to report the checkpoint of step {step}")

    def newest_step(self) -> int | None:
        """The most train steps of a checkpoint from which the ledger can serve a trainer; None = any."""
        return self.status()["newest_step"]

    def status(self) -> dict[str, Any]:
        """What GET /status answers."""
        return orjson.loads(self._call("/status", None, "for its status"))

    def post(self, path: str, body: bytes, purpose: str) -> bytes:
        """The answer of any route, asked again until there is one."""
        return self._call(path, body, purpose)

    def finish(self, steps: int) -> None:
        """Training is over after `steps`: the controller exits. One that cannot be reached has already exited."""
        try:
            self._call("/finish", FinishRequest(run_id=self._run_id, steps=steps), "to finish", is_last=True)
        except ServerUnavailable as error:
            _log.warning("the rollout controller has already exited: %s", error)

    def close(self) -> None:
        """Close the connections. A later call opens one."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                self._idle.pop().close()

    def _call(
        self,
        path: str,
        request: TrainerRequest | bytes | None,
        purpose: str,
        *,
        is_last: bool = False,
        not_ready: Callable[[], None] = lambda: None,
    ) -> bytes:
        """`is_last`: give up soon, because the controller may have exited. `not_ready`: called before a repetition."""
        reconnect_s, silent_s = (FINISH_S, 0.0) if is_last else (self._reconnect_s, self._silent_s)
        answered_s = reached_s = time.monotonic()
        while True:
            try:
                status, answer = self._exchange(path, request)
            except (OSError, http.client.HTTPException) as error:
                now_s = time.monotonic()
                if isinstance(error, TimeoutError) and now_s - answered_s < silent_s:
                    _log.warning("the %s has not answered for %.0f s %s", self._server, now_s - answered_s, purpose)
                    reached_s = now_s
                elif now_s - reached_s >= reconnect_s:
                    raise ServerUnavailable(
                        f"the {self._server} could not be reached for {reconnect_s:g} s {purpose} "
                        f"({type(error).__name__}: {error}); see its log",
                        code="rollout.controller_unreachable",
                    ) from error
                time.sleep(RETRY_S)
                continue
            if status == 200:
                return answer
            if status != 204:
                raise _error_of(self._server, path, status, answer)
            answered_s = reached_s = time.monotonic()
            not_ready()

    def _exchange(self, path: str, request: TrainerRequest | bytes | None) -> tuple[int, bytes]:
        body = request if request is None or isinstance(request, bytes) else orjson.dumps(request)
        address = self._known
        is_new = address is None
        if address is None:
            address = self._known = self._address if isinstance(self._address, str) else self._address()
            self.close()
        try:
            with contextlib.suppress(IndexError, ConnectionError):  # the controller closes one that is idle for long
                return self._exchange_over(self._idle.pop(), path, body, is_new=is_new)
            parts = urlsplit(address)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self._answer_s)
            return self._exchange_over(connection, path, body, is_new=is_new)
        except (OSError, http.client.HTTPException):
            self._known = None
            raise

    def _exchange_over(
        self, connection: http.client.HTTPConnection, path: str, body: bytes | None, *, is_new: bool
    ) -> tuple[int, bytes]:
        """Status and body of the answer. The connection is kept for the next exchange, or closed."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        is_open = False
        try:
            connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
            response = connection.getresponse()
            if response.status in (404, 405) or (response.status == 401 and not is_new):
                raise ConnectionError(f"another process than the {self._server} listens at {self._known}")
            answer = response.read()
            is_open = not response.will_close
            return response.status, answer
        finally:
            if is_open:
                self._idle.append(connection)
            else:
                connection.close()


class ControllerError(ServerUnavailable):
    """The controller answered that a call failed."""


def _error_of(server: str, path: str, status: int, answer: bytes) -> ArealError:
    message, code = answer[:200].decode(errors="replace"), "rollout.controller_error"
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        body = orjson.loads(answer)
        message, code = str(body["error"]), str(body["code"])
    if status == 409 and code == WeightsNeeded.code:
        return WeightsNeeded(message)
    if 400 <= status < 500 and status != 412:  # 412: after a restart from an earlier checkpoint it succeeds
        return RequestError(message, code=code)
    return ControllerError(f"the {server} could not serve {path}: {message}", code=code)
