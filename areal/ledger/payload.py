"""The binary form of the token table of one episode. A payload is written once, when the episode is accepted (or
rejected, see kept.py).

Little-endian: magic, CRC-32 of all that follows, episode id, numbers of trajectories and tokens, size of the header;
the header, JSON that declares each column beyond the core (empty without any); the core columns in the order of
`areal.api.table.CORE`; the other columns in the order of the header.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import orjson

from areal.api.columns import ColumnSpec, to_array
from areal.api.data import BASELINE, MAX_LOGPROB, TURN_REWARDS, Trajectory, TrajectoryGroup, first_of_sessions
from areal.api.errors import ArealError, InputError, LedgerError
from areal.api.table import CORE, IMAGE_COUNT, SESSION, StoredColumn, TokenTable, image_columns, images_of, to_numpy
from areal.data.tree_shares import GroupTree, group_tree
from areal.ledger.event_files import PayloadReader
from areal.ledger.state import Event, TokenCounts, count_by_version

_MAGIC = b"ART1"
_HEAD = struct.Struct("<4sIQIII")  # magic, CRC-32, episode id, trajectories, tokens, bytes of the header
_CHECKED_FROM = 8

_RECORD = ColumnSpec("record", "u1", per="group", show="")  # `TrajectoryGroup.record`.


class TrajectoryError(ArealError, ValueError):
    """A workflow returned trajectories that cannot be trained on. It fails this episode only."""


class EncodedEpisode(NamedTuple):
    """The payload and the fields of its `accepted` event."""

    payload: bytes
    num_tokens: int
    num_generated: int
    min_version: int
    """Oldest version of a generated token; -1 when none was generated."""
    max_version: int
    counts: TokenCounts
    turn_ids: tuple[str, ...] = ()
    """Turns of agents that it adopts."""

    @property
    def reward(self) -> float:
        """Mean over the sessions."""
        return self.counts.reward


class TokenLimits(NamedTuple):
    """What a trainer can train on, in an episode that is accepted now."""

    vocab_size: int
    newest_version: int
    """The highest policy version that can have generated a token."""
    strict: bool = False
    """rollout.check_trajectory_format."""
    longest_row: int = 2**31
    """Tokens of a trajectory that fit into a forward pass of every model."""


LARGEST_REWARD = 1e15
"""The square of a larger number, summed over a batch, is beyond float32."""


def check_episode(group: TrajectoryGroup) -> None:
    """Raise TrajectoryError for a group without trajectories, unequal lengths or a reward that is not finite."""
    if not group.trajectories:
        raise _no_trajectories()
    try:
        for trajectory in group.trajectories:
            _checked_length(trajectory, is_scored=True)
    except TypeError as error:
        raise _wrong_type(error) from error


def encode_episode(episode_id: int, group: TrajectoryGroup, limits: TokenLimits | None = None) -> EncodedEpisode:
    """The payload of a group. Raises TrajectoryError as `check_episode`, and for values of a wrong type or range.

    `limits`: it is to be trained on; numbers that a trainer cannot use are errors too.
    """
    if not group.trajectories:
        raise _no_trajectories()
    return _encode(episode_id, group.trajectories, record=group.record, limits=limits, turn_ids=tuple(group.turn_ids))


def encode_unscored(episode_id: int, trajectories: list[Trajectory]) -> bytes:
    """The payload of trajectories without rewards. Raises TrajectoryError for unequal lengths."""
    return _encode(episode_id, trajectories, is_scored=False).payload


def _encode(
    episode_id: int,
    trajectories: list[Trajectory],
    *,
    is_scored: bool = True,
    record: str = "",
    limits: TokenLimits | None = None,
    turn_ids: tuple[str, ...] = (),
) -> EncodedEpisode:
    try:
        lengths = [_checked_length(row, is_scored=is_scored) for row in trajectories]
        num_tokens, body = sum(lengths), None
        if num_tokens <= _SHORT and not record:
            body = _short_body(episode_id, trajectories, lengths, limits)
        if body is None:
            body = _body(episode_id, trajectories, lengths, record, limits)
    except ArealError:
        raise
    except (TypeError, OverflowError, ValueError) as error:
        raise _wrong_type(error) from error
    pieces, by_version, num_trained = body
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    made_by = [version for version, _, _ in by_version if version != -1] or [-1]
    sessions, num_finished, reward = first_of_sessions(trajectories), 0, 0.0
    for row in sessions:
        num_finished += row.finished
        reward += row.reward
    return EncodedEpisode(
        b"".join((_MAGIC, checksum.to_bytes(4, "little"), *pieces)),
        num_tokens,
        num_trained,
        made_by[0],
        made_by[-1],
        TokenCounts(len(trajectories), len(sessions), num_finished, max(lengths), reward / len(sessions), by_version),
        turn_ids,
    )


def _no_trajectories() -> TrajectoryError:
    message = "the workflow returned a group without trajectories; return None to reject an episode"
    return TrajectoryError(message, code="workflow.trajectory_lengths")


def _wrong_type(error: Exception) -> TrajectoryError:
    message = f"a trajectory holds a value of the wrong type or range: {error}"
    return TrajectoryError(message, code="workflow.wrong_type")


def _not_finite(name: str, value: float) -> TrajectoryError:
    message = f"a trajectory has {name}={value}, which is no finite number of at most {LARGEST_REWARD:g}"
    return TrajectoryError(message, code="workflow.not_finite")


def _checked_length(trajectory: Trajectory, *, is_scored: bool) -> int:
    """The number of tokens of a trajectory that passes the checks."""
    size, num_versions = len(trajectory.token_ids), len(trajectory.output_versions)
    if not size or not size == len(trajectory.loss_mask) == len(trajectory.rollout_logprobs) == num_versions:
        raise TrajectoryError(
            f"a trajectory has {size} token_ids, {len(trajectory.loss_mask)} loss_mask, "
            f"{len(trajectory.rollout_logprobs)} rollout_logprobs and {num_versions} "
            "output_versions: they must be equally long and not empty",
            code="workflow.trajectory_lengths",
        )
    if is_scored and not abs(trajectory.reward) <= LARGEST_REWARD:
        raise _not_finite("reward", trajectory.reward)
    return size


_SHORT = 128  # Up to this number of tokens, the functions of Python are faster than arrays.
_FLOAT_MAX = 3.4e38
_Pieces: TypeAlias = "tuple[bytes | bytearray | memoryview | array[Any], ...]"
_Body: TypeAlias = "tuple[_Pieces, tuple[tuple[int, int, int], ...], int]"
"""What the checksum of a payload covers, `TokenCounts.by_version`, and the number of trained tokens."""


@functools.lru_cache(1024)
def _short_form(rows: int, size: int) -> struct.Struct:
    """All of the body without a header: the core columns in the order of `CORE`."""
    return struct.Struct(f"QIII{rows}i{size}i{size}i{rows}f{size}f{size}s{rows}s")


def _short_body(
    episode_id: int, trajectories: list[Trajectory], lengths: list[int], limits: TokenLimits | None
) -> _Body | None:
    """The body of few tokens in the core columns alone, whose numbers a trainer can use; None = of all others."""
    token_ids: list[int] = []  # `list[int]()` takes ten times as long
    versions: list[int] = []
    logprobs: list[float] = []
    loss_mask: list[int] = []
    last_mask = last_made = mask_numbers = made_numbers = None  # as in `_body`
    for row in trajectories:
        if row.columns or row.images or row.session >= 0:
            return None
        if mask_numbers is None or row.loss_mask is not last_mask:
            last_mask, mask_numbers = row.loss_mask, [*row.loss_mask]
        if made_numbers is None or row.output_versions is not last_made:
            last_made, made_numbers = row.output_versions, [*row.output_versions]
        token_ids += row.token_ids
        versions += made_numbers
        logprobs += row.rollout_logprobs
        loss_mask += mask_numbers
    rewards, finished = [row.reward for row in trajectories], [row.finished for row in trajectories]
    mask, rows, size = bytes(loss_mask), len(lengths), len(token_ids)
    head, form = (episode_id, rows, size, 0), _short_form(rows, size)
    try:
        body = form.pack(*head, *lengths, *token_ids, *versions, *rewards, *logprobs, mask, bytes(finished))
    except struct.error:
        return None
    num_trained, trained = mask.count(1), list(compress(versions, mask))
    by_version: list[tuple[int, int, int]] = []
    for version in sorted(set(versions)):
        by_version.append((int(version), versions.count(version), trained.count(version)))
    if limits is not None and not (
        not limits.strict
        and min(token_ids) >= 0
        and max(token_ids) < limits.vocab_size
        and max(logprobs) <= MAX_LOGPROB
        and sum(logprobs) > -_FLOAT_MAX  # false when a number is NaN, and no number is below it
        and mask.count(0) + num_trained == size
        and mask.find(1, 1, lengths[0]) > 0
        and by_version[0][0] >= -1
        and by_version[-1][0] <= limits.newest_version
        and size <= limits.longest_row  # that of all rows
    ):
        return None
    return (body,), tuple(by_version), num_trained


class _Tokens(NamedTuple):
    """The per-token columns of an episode: int32, int32, float32 and uint8."""

    token_ids: array[int]
    versions: array[int]
    logprobs: array[float]
    loss_mask: bytearray
    lengths: list[int]

    def check(self, limits: TokenLimits, oldest: int, newest: int) -> None:
        """Raise TrajectoryError for numbers that no trainer can use, and InputError for too long rows. `oldest`,
        `newest`: of all versions."""
        ids, logprobs = np.frombuffer(self.token_ids, "i4"), np.frombuffer(self.logprobs, "f4")
        if np.maximum.reduce(ids.view("u4")) >= limits.vocab_size:  # a negative id is a large number
            wrong = (ids < 0) | (ids >= limits.vocab_size)
            raise self._wrong("token_ids", ids, wrong, f"outside of the vocabulary (0 to {limits.vocab_size - 1})")
        if self.loss_mask.count(0) + self.loss_mask.count(1) < len(self.loss_mask):
            mask = np.frombuffer(self.loss_mask, np.uint8)
            raise self._wrong("loss_mask", mask, mask > 1, "neither 0 nor 1")
        if not (np.maximum.reduce(logprobs) <= MAX_LOGPROB and np.minimum.reduce(logprobs) > -np.inf):  # or NaN
            wrong = ~((logprobs <= MAX_LOGPROB) & np.isfinite(logprobs))
            raise self._wrong("rollout_logprobs", logprobs, wrong, "which is not a log-probability")
        if newest > limits.newest_version or oldest < -1:
            versions = np.frombuffer(self.versions, "i4")
            wrong = (versions > limits.newest_version) | (versions < -1)
            text = f"which is no policy version: the newest one is {limits.newest_version}"
            raise self._wrong("output_versions", versions, wrong, text)
        if max(self.lengths) > limits.longest_row:
            text = f"a trajectory has {max(self.lengths)} tokens, and mb_spec.max_tokens_per_mb={limits.longest_row}"
            raise InputError(f"{text}: raise it, or lower gconfig.max_tokens", code="data.too_long")
        first, has_trained = 0, list[bool]()
        for length in self.lengths:  # the first token of a row is never trained
            has_trained.append(self.loss_mask.find(1, first + 1, first + length) >= 0)
            first += length
        if not any(has_trained) or (limits.strict and not all(has_trained)):
            problem = "marks no token to train on: the first one has no prediction"
            raise TrajectoryError(f"loss_mask {problem}", code="workflow.loss_mask")
        if limits.strict:
            self._check_form()

    def _check_form(self) -> None:
        """The additional rules of rollout.check_trajectory_format."""
        mask, logprobs = np.frombuffer(self.loss_mask, np.uint8), np.frombuffer(self.logprobs, "f4")
        versions, is_trained = np.frombuffer(self.versions, "i4"), mask > 0
        is_first = np.zeros(len(mask), bool)
        is_first[np.cumsum([0, *self.lengths[:-1]])] = True
        for name, values, wrong, text in (
            ("loss_mask", mask, is_trained & is_first, "on the first token, which has no prediction"),
            ("rollout_logprobs", logprobs, ~is_trained & (logprobs != 0), "but loss_mask is 0 there"),
            ("output_versions", versions, is_trained & (versions < 0), "but loss_mask marks this token"),
        ):
            if wrong.any():
                raise self._wrong(name, values, wrong, text)

    def _wrong(self, name: str, values: np.ndarray, wrong: np.ndarray, text: str) -> TrajectoryError:
        place, row = int(np.flatnonzero(wrong)[0]), 0
        value = values[place]
        while place >= self.lengths[row]:
            place, row = place - self.lengths[row], row + 1
        return TrajectoryError(f"{name}[{place}] of trajectory {row} is {value}, {text}", code=f"workflow.{name}")


def _body(
    episode_id: int, trajectories: list[Trajectory], lengths: list[int], record: str, limits: TokenLimits | None
) -> _Body:
    token_ids, versions, logprobs, loss_mask = array("i"), array("i"), array("f"), bytearray()
    # Rows of short answers to one prompt mostly share these two columns: they become an array once.
    last_mask = last_made = mask_numbers = made_numbers = None
    for trajectory in trajectories:
        mask, made = trajectory.loss_mask, trajectory.output_versions
        if mask_numbers is None or mask is not last_mask:
            last_mask, mask_numbers = mask, to_array("B", mask)
        if made_numbers is None or made is not last_made:
            last_made, made_numbers = made, to_array("i", made)
        token_ids += to_array("i", trajectory.token_ids)
        versions += made_numbers
        logprobs += to_array("f", trajectory.rollout_logprobs)
        loss_mask += mask_numbers
    by_version = count_by_version(versions, loss_mask)
    if limits is not None:
        tokens = _Tokens(token_ids, versions, logprobs, loss_mask, lengths)
        tokens.check(limits, by_version[0][0], by_version[-1][0])
    columns = list(_columns(trajectories, lengths, record))
    header = orjson.dumps([_declared(spec, values) for spec, values in columns]) if columns else b""
    rewards = array("f", [trajectory.reward for trajectory in trajectories])
    finished = bytes([trajectory.finished for trajectory in trajectories])
    pieces = (
        _HEAD.pack(_MAGIC, 0, episode_id, len(lengths), len(token_ids), len(header))[_CHECKED_FROM:],
        header,
        *(array("i", lengths), token_ids, versions, rewards, logprobs, loss_mask, finished),
        *(np.ascontiguousarray(values).data for _, values in columns),
    )
    return pieces, by_version, loss_mask.count(1)


# ----------------------------------------------------------------------------------------------------------------------
# Columns beyond the core.


def _columns(
    trajectories: Sequence[Trajectory], lengths: Sequence[int], record: str
) -> Iterator[tuple[ColumnSpec, np.ndarray]]:
    """Each column that any trajectory has, with rows for all of them."""
    for spec in dict.fromkeys(spec for row in trajectories for spec in row.columns):
        values_of_rows = [row.columns.get(spec) for row in trajectories]
        if spec.per == "token":
            yield spec, _token_column(spec, values_of_rows, lengths)
        else:
            yield spec, _sequence_column(spec, values_of_rows)
    if any(row.session >= 0 for row in trajectories):
        yield SESSION, np.array([row.session for row in trajectories], "i4")
        _check_rewards(trajectories)
    if any(row.images for row in trajectories):
        yield from image_columns([row.images for row in trajectories]).items()
    if record:
        yield _RECORD, np.frombuffer(record.encode(), np.uint8)


def _token_column(spec: ColumnSpec, values_of_rows: Sequence[Any], lengths: Sequence[int]) -> np.ndarray:
    arrays = [None if values is None else to_numpy(values, spec.dtype) for values in values_of_rows]
    first = next(values for values in arrays if values is not None)
    missing = StoredColumn(spec, first.dtype.str, first.shape[1:])
    for values, size in zip(arrays, lengths, strict=True):
        if values is not None and (len(values) != size or values.shape[1:] != first.shape[1:]):
            text = f"a trajectory has {spec.name} of shape {values.shape} for {size} token_ids"
            raise TrajectoryError(f"{text}: give one row for each", code="workflow.trajectory_lengths")
    rows = [missing.filled(size) if values is None else values for values, size in zip(arrays, lengths, strict=True)]
    joined = np.concatenate(rows)
    _require_finite(spec, joined, may_be_nan=spec.fill is None)
    return joined


def _sequence_column(spec: ColumnSpec, values_of_rows: Sequence[Any]) -> np.ndarray:
    numbers: list[Any] = [value for value in values_of_rows if value is not None]
    stored = to_numpy(numbers, spec.dtype)
    _require_finite(spec, stored, may_be_nan=False)
    if len(numbers) < len(values_of_rows):
        every = StoredColumn(spec, stored.dtype.str, stored.shape[1:]).filled(len(values_of_rows))
        every[[value is not None for value in values_of_rows]] = stored
        return every
    return stored


def _require_finite(spec: ColumnSpec, values: np.ndarray, *, may_be_nan: bool) -> None:
    if values.dtype.kind != "f":
        return
    wrong = ~np.isfinite(values)
    if may_be_nan:
        wrong &= ~np.isnan(values)
    if spec in (BASELINE, TURN_REWARDS):
        wrong |= np.abs(values) > LARGEST_REWARD
    if wrong.any():
        raise _not_finite(spec.name, float(values[wrong][0]))


def _check_rewards(trajectories: Sequence[Trajectory]) -> None:
    of_session: dict[int, float] = {}
    for row in trajectories:
        if row.session >= 0 and of_session.setdefault(row.session, row.reward) != row.reward:
            text = f"rows of session {row.session} have rewards {of_session[row.session]} and {row.reward}: give one"
            raise TrajectoryError(text, code="workflow.session_rewards")


def _declared(spec: ColumnSpec, values: np.ndarray) -> list[Any]:
    rows = len(values) if spec.per == "group" else 0
    declaration = [spec.name, spec.dtype, spec.per, spec.is_predicted, spec.fill, spec.show]
    return [declaration, values.dtype.str, values.shape[1:], rows]


# ----------------------------------------------------------------------------------------------------------------------
# Reading.


class PayloadHead(NamedTuple):
    """What decides which rank trains on an episode, and with which columns."""

    num_tokens: int
    columns: tuple[StoredColumn, ...]
    tree: GroupTree | None = None


def payload_head(payload: bytes, *, with_tree: bool = False) -> PayloadHead:
    """Raises ValueError for other bytes."""
    _, _, _, num_rows, num_tokens, size = _HEAD.unpack_from(payload)
    end = _HEAD.size + size
    columns = _header(payload[_HEAD.size : end])
    if not with_tree:
        return PayloadHead(num_tokens, columns)
    lengths = np.frombuffer(payload, "<i4", num_rows, end)
    token_ids = np.frombuffer(payload, "<i4", num_tokens, end + lengths.nbytes)
    return PayloadHead(num_tokens, columns, group_tree(token_ids, lengths))


def read_head(
    reader: PayloadReader, episode_id: int, where: tuple[int, int, int], *, with_tree: bool = False
) -> PayloadHead:
    """The head of a recorded payload, of a few bytes at its start and, for its tree, its tokens. Raises LedgerError."""
    segment, offset, _ = where
    start = reader.read((segment, offset, _HEAD.size))
    _require_format(episode_id, start)
    _, _, _, num_rows, num_tokens, size = _HEAD.unpack(start)
    size += 4 * (num_rows + num_tokens) if with_tree else 0
    try:
        return payload_head(start + reader.read((segment, offset + _HEAD.size, size)), with_tree=with_tree)
    except ValueError as error:
        raise _bad_payload(episode_id, f"is damaged: {error}") from error


@functools.lru_cache(256)  # nearly all payloads of a run have equal headers
def _header(header: bytes) -> tuple[StoredColumn, ...]:
    """Raises ValueError for other bytes."""
    entries: list[Any] = orjson.loads(header) if header else []
    return tuple(column_of(entry) for entry in entries)


def column_of(entry: Sequence[Any]) -> StoredColumn:
    """The column that `declaration` wrote."""
    (name, dtype, per, is_predicted, fill, show), stored, shape, rows = entry
    return StoredColumn(ColumnSpec(name, dtype, per, is_predicted, fill, show), stored, tuple(shape), rows)


def declaration(column: StoredColumn) -> list[Any]:
    """`column` as JSON."""
    spec = column.spec
    return [[spec.name, spec.dtype, spec.per, spec.is_predicted, spec.fill, spec.show], *column[1:]]


def check_payload(episode_id: int, payload: bytes) -> None:
    """LedgerError unless `payload` is the complete, undamaged record of that episode."""
    _require_format(episode_id, payload)
    _, checksum, recorded, _, _, _ = _HEAD.unpack_from(payload)
    if checksum != zlib.crc32(memoryview(payload)[_CHECKED_FROM:]):
        raise _bad_payload(episode_id, "is damaged: its checksum does not match")
    if recorded != episode_id:
        raise _bad_payload(episode_id, f"belongs to episode {recorded}")


def _require_format(episode_id: int, payload: bytes) -> None:
    if len(payload) < _HEAD.size or payload[:4] != _MAGIC:
        raise _bad_payload(episode_id, f"does not start with {_MAGIC.decode()}")


def _bad_payload(episode_id: int, problem: str) -> LedgerError:
    return LedgerError(f"the payload of episode {episode_id} {problem}", code="ledger.bad_payload")


def read_table(reader: PayloadReader, event: Event) -> TokenTable:
    """The trajectories of an `accepted` event. Raises LedgerError when its payload is missing, damaged or another."""
    segment, offset, size = event["payload"]
    return to_table(event["id"], reader.read((segment, offset, size)))


def to_table(episode_id: int, payload: bytes) -> TokenTable:
    """The trajectories of the payload of an episode. Raises LedgerError when it is damaged or another's."""
    check_payload(episode_id, payload)
    try:
        table = table_of(payload)
    except ValueError as error:
        raise _bad_payload(episode_id, f"has {len(payload)} bytes, which do not match its counts: {error}") from error
    if not len(table.lengths) or not len(table.token_ids) or int(table.lengths.sum()) != len(table.token_ids):
        raise _bad_payload(episode_id, f"has trajectory lengths whose sum is not {len(table.token_ids)}")
    return table


def table_of(payload: bytes) -> TokenTable:
    """The table of a payload that was checked: views of its bytes. Raises ValueError when counts and size differ."""
    _, _, _, num_rows, num_tokens, size = _HEAD.unpack_from(payload)
    place = _HEAD.size
    stored, place = _header(payload[place : place + size]), place + size
    core: dict[str, np.ndarray] = {}
    for name, per, dtype in CORE:
        values = np.frombuffer(payload, dtype, num_rows if per == "sequence" else num_tokens, place)
        core[name], place = values, place + values.nbytes
    columns: dict[ColumnSpec, np.ndarray] = {}
    for spec, dtype, shape, rows in stored:
        count = num_tokens if spec.per == "token" else num_rows if spec.per == "sequence" else rows
        values = np.frombuffer(payload, dtype, count * math.prod(shape), place) if count * math.prod(shape) else None
        columns[spec] = np.zeros((count, *shape), dtype) if values is None else values.reshape(count, *shape)
        place += columns[spec].nbytes
    if place != len(payload):
        raise ValueError(f"{place} bytes are declared")
    return TokenTable(**core, columns=columns)


def record_of(table: TokenTable) -> str:
    """JSON text that the workflow recorded for reward functions."""
    return table.columns[_RECORD].tobytes().decode() if _RECORD in table.columns else ""


def recorded_sessions(record: str) -> list[Mapping[str, Any]]:
    """The sessions of an agent in the text that its workflow recorded; those without trajectories are last."""
    sessions: list[Mapping[str, Any]] = orjson.loads(record).get("sessions", []) if record else []
    return sessions


def columns_of_row(table: TokenTable, row: int, tokens: slice) -> dict[ColumnSpec, Any]:
    """The columns of one trajectory as its workflow made them: numbers and lists, and arrays where a row has several.

    Those that have only fill values are left out.
    """
    columns: dict[ColumnSpec, Any] = {}
    for spec, values in table.columns.items():
        if spec in (SESSION, IMAGE_COUNT) or spec.per == "group":
            continue
        part = values[tokens] if spec.per == "token" else values[row : row + 1]
        missing = StoredColumn(spec, values.dtype.str, values.shape[1:]).filled(1)
        if np.array_equal(part, np.broadcast_to(missing, part.shape), equal_nan=part.dtype.kind == "f"):
            continue
        plain: Any = part.tolist() if part.ndim == 1 else part
        columns[spec] = plain if spec.per == "token" else plain[0]
    return columns


def group_of_payload(episode_id: int, payload: bytes) -> TrajectoryGroup:
    """The group that `encode_episode` wrote, with its record, without statistics. LedgerError when it is damaged."""
    table = to_table(episode_id, payload)
    sessions = table.columns.get(SESSION)
    pictures = images_of(table)
    trajectories: list[Trajectory] = []
    end = 0
    for row, size in enumerate(table.lengths.tolist()):
        span = slice(end, end + size)
        end += size
        trajectories.append(
            Trajectory(
                token_ids=table.token_ids[span].tolist(),
                loss_mask=table.loss_mask[span].tolist(),
                rollout_logprobs=table.rollout_logprobs[span].tolist(),
                output_versions=table.output_versions[span].tolist(),
                reward=float(table.rewards[row]),
                finished=bool(table.finished[row]),
                session=-1 if sessions is None else int(sessions[row]),
                images=pictures[row] if pictures else (),
                columns=columns_of_row(table, row, span),
            )
        )
    return TrajectoryGroup(trajectories=trajectories, record=record_of(table))
