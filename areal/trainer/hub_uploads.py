"""Uploads of exports to the Hugging Face hub by a thread, while training continues."""

import threading
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue

from areal.api.config import HubUploadConfig
from areal.observe.log import get_logger
from areal.system.durable import COMPLETE

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class HubUploads:
    """One upload at a time, in order, each repeated after a failure. Training never waits for one, its end does."""

    def __init__(self, config: HubUploadConfig) -> None:
        """The token is that of the environment (HF_TOKEN) or of `hf auth login`."""
        self._config = config
        self._queue: SimpleQueue[tuple[int, Path, Future[None]] | None] = SimpleQueue()
        self._unfinished: dict[Path, Future[None]] = {}
        # A daemon: a connection that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="hub-upload", daemon=True)
        self._thread.start()
        self._ends = threading.Event()
        self.num_failed = 0
        """Uploads that were given up."""

    def add(self, step: int, folder: Path) -> None:
        """Upload a complete export after those before it."""
        self._unfinished[folder] = Future()
        self._queue.put((step, folder, self._unfinished[folder]))

    def waiting(self) -> set[Path]:
        """Exports whose upload has not ended. They must not be removed."""
        self._unfinished = {folder: one for folder, one in self._unfinished.items() if not one.done()}
        return set(self._unfinished)

    def close(self) -> None:
        """Wait for the uploads, at most `timeout_s` together; the rest is given up."""
        self._queue.put(None)
        if waiting := sorted(self.waiting()):
            text = "waits for the upload of %s to %s, at most %g s (saver.hub_upload.timeout_s)"
            names = ", ".join(folder.name for folder in waiting)
            get_logger("trainer").info(text, names, self._config.repo_id, self._config.timeout_s)
            wait(self._unfinished.values(), self._config.timeout_s)
        self._ends.set()
        for folder in sorted(self.waiting()):
            self._report(folder)

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            step, folder, done = order
            self._upload(step, folder)
            done.set_result(None)

    def _report(self, folder: Path) -> None:
        self.num_failed += 1
        text = "%s was not uploaded to %s; to upload it: hf upload %s %s"
        get_logger("trainer").error(text, folder, self._config.repo_id, self._config.repo_id, folder)

    def _upload(self, step: int, folder: Path) -> None:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._config.retries + 1):
            if self._ends.is_set():
                break
            try:
                self._once(step, folder)
            except Exception as error:  # noqa: BLE001 - a request to a foreign server, through a foreign library
                text = "the upload of %s to %s failed (attempt %d of %d): %s"
                facts = (folder, self._config.repo_id, attempt + 1, self._config.retries + 1)
                get_logger("trainer").warning(text, *facts, " ".join(str(error).split())[:500])
                if is_final(error):
                    break
                self._ends.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                get_logger("trainer").info("uploaded %s to %s", folder.name, self._config.repo_id)
                return
        if not self._ends.is_set():
            self._report(folder)

    def _once(self, step: int, folder: Path) -> None:
        from huggingface_hub import HfApi

        hub, repo = HfApi(), self._config.repo_id
        hub.create_repo(repo, private=self._config.private, exist_ok=True)
        hub.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=f"After {step} train steps", ignore_patterns=[COMPLETE]
        )


def is_final(error: Exception) -> bool:
    """Whether a repeated upload would fail again: the hub refused it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500 and status not in (408, 409, 412, 429)
