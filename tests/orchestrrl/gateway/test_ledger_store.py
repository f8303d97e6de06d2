"""The ledger on disk: a returning client finds its answer, even if the process that served it has died."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Permanent
from orchestrrl.engines.base import Chunk, CompletionEndpoint
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.ledger import store as store_module
from orchestrrl.gateway.ledger.file import AnswerFile, AnswerRow, NamedRequest, RequestClaims, check
from orchestrrl.gateway.ledger.ledger import DuplicateRequest, RequestFailure, RequestRecord
from orchestrrl.gateway.ledger.pieces import RecordCutter, key_of, put_together
from orchestrrl.gateway.ledger.store import LedgerEntry, LedgerStore, RetentionPolicy

WITHIN_S = 120.0
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 100_000}


@asynccontextmanager
async def running(path: Path, **keep: Any) -> AsyncIterator[LedgerStore]:
    store = LedgerStore(RetentionPolicy(path, **{"from_s": 0.0, **keep}), WallClock())
    store.start()
    yield store
    await store.close()


async def entered(
    store: LedgerStore, name: str = "r", *, body: dict[str, Any] = BODY, stream: bool = False
) -> LedgerEntry:
    whole = {**body, "stream": stream}
    ask = read_completion_request(
        CompletionEndpoint.COMPLETIONS, whole, request_id=name, group="", tag="", default_model="m", now_s=1.0
    )
    entry = await store.enter(ask, whole)
    assert entry is not None
    return entry


def grow(record: RequestRecord, *ids: int) -> None:
    text = "".join(f"<{token}>" for token in ids)
    record.append(Chunk(ids, text), text, None, 0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def until_written(path: Path, entry: LedgerEntry) -> None:
    with closing(AnswerFile(path)) as reader:
        await until(lambda: reader.has(entry.key))


async def test_returning_client_receives_its_complete_answer(tmp_path: Path) -> None:
    async with running(tmp_path / "ledger") as store:
        entry = await entered(store)
        grow(entry.records[0], 1, 2, 3)
        entry.records[0].finish("stop", 3, 0.0)
        store.leave(entry)
        again = await entered(store, stream=True)
        (record,) = again.records
        assert (list(record.generated_ids), record.text) == ([1, 2, 3], "<1><2><3>")
        assert (record.finish_reason, record.stop_reason) == ("stop", 3)
        assert [delta.chunk.token_ids for delta in record.take_undelivered()] == [(1, 2, 3)]
        assert again.created_s == 1.0
        assert store.counts.replayed == 1
        store.leave(again)
    async with running(tmp_path / "ledger") as store:
        assert (await entered(store)).records[0].done


async def test_incomplete_answer_continues(tmp_path: Path) -> None:
    async with running(tmp_path / "ledger") as store:
        for tokens in ((1, 2), (3,), (4, 5)):
            entry = await entered(store)
            grow(entry.records[0], *tokens)
            store.leave(entry)
        entry = await entered(store)
        assert list(entry.records[0].generated_ids) == [1, 2, 3, 4, 5]
        assert not entry.records[0].done
        assert (store.counts.resumed, store.counts.resumed_tokens) == (3, 2 + 3 + 5)
        store.leave(entry)


async def test_each_of_several_answers_is_stored(tmp_path: Path) -> None:
    body = {**BODY, "n": 3}
    async with running(tmp_path / "ledger") as store:
        entry = await entered(store, body=body)
        grow(entry.records[0], 1)
        entry.records[0].finish("stop", None, 0.0)
        grow(entry.records[2], 7, 8)
        store.leave(entry)
        again = await entered(store, body=body)
        assert [list(record.generated_ids) for record in again.records] == [[1], [], [7, 8]]
        assert [record.done for record in again.records] == [True, False, False]
        store.leave(again)


async def test_request_id_is_bound_to_one_body(tmp_path: Path) -> None:
    async with running(tmp_path / "ledger") as store:
        entry = await entered(store)
        grow(entry.records[0], 1)
        store.leave(entry)
        with pytest.raises(DuplicateRequest, match="another body"):
            await entered(store, body={**BODY, "temperature": 0.5})
        store.leave(await entered(store))


async def test_id_in_flight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CLAIM_WITHIN_S", 0.7)
    async with running(tmp_path / "ledger") as store, running(tmp_path / "ledger") as other:
        entry = await entered(store)
        for asked in (store, other):
            with pytest.raises(DuplicateRequest, match="in flight"):
                await entered(asked)
        waiting = asyncio.create_task(entered(other))
        await asyncio.sleep(0)
        grow(entry.records[0], 4)
        store.leave(entry)
        taken = await waiting
        assert list(taken.records[0].generated_ids) == [4]
        other.leave(taken)


async def test_request_refused_with_4xx_is_not_continued(tmp_path: Path) -> None:
    async with running(tmp_path / "ledger") as store:
        for status, kept in ((503, [1]), (500, [1]), (400, [])):
            entry = await entered(store)
            if not entry.records[0].generated_ids:
                grow(entry.records[0], 1)
            entry.records[0].fail(RequestFailure(status, {}), 0.0)
            store.leave(entry)
            again = await entered(store)
            assert list(again.records[0].generated_ids) == kept
            store.leave(again)


async def test_progress_is_stored_before_the_end(tmp_path: Path) -> None:
    async with running(tmp_path / "ledger") as store:
        entry = await entered(store)
        grow(entry.records[0], 1)
        await until_written(tmp_path / "ledger", entry)
        with closing(AnswerFile(tmp_path / "ledger")) as reader:
            grow(entry.records[0], 2)

            def all_there() -> bool:
                asked, pieces = reader.read(entry.key, "r")
                return asked is not None and list(put_together(pieces)[0].ids) == [1, 2]

            await until(all_there)
        store.leave(entry)


async def test_short_request_is_not_stored_and_its_id_is_free(tmp_path: Path) -> None:
    async with running(tmp_path / "ledger", from_s=60.0) as store:
        entry = await entered(store)
        grow(entry.records[0], 1)
        entry.records[0].finish("stop", None, 0.0)
        store.leave(entry)
        other = await entered(store, body={**BODY, "temperature": 0.5})
        assert not other.records[0].generated_ids
        grow(other.records[0], 7)
        await until(lambda: other.named_request is not None)  # longer requests are stored
        store.leave(other)
        with pytest.raises(DuplicateRequest, match="another body"):
            await entered(store)


async def test_failing_disk_does_not_stop_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(store_module, "PRUNE_EVERY_S", 0.02)  # how long the writer waits for orders
    full = True
    write = AnswerFile.write

    def failing(file: AnswerFile, rows: Any) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        write(file, rows)

    monkeypatch.setattr(AnswerFile, "write", failing)
    async with running(tmp_path / "ledger") as store:
        long, short = await entered(store, "long"), await entered(store, "short")
        grow(long.records[0], 1)
        grow(short.records[0], 1)
        store.leave(short)
        await until(lambda: store.failing != "")
        await asyncio.sleep(0.3)  # without a successful write, the store stays failing
        assert store.failing
        again = await entered(store, "short")
        assert not again.records[0].generated_ids
        store.leave(again)
        full = False
        grow(long.records[0], 2)
        await until(lambda: store.failing == "")
        grow(long.records[0], 3)
        store.leave(long)
        assert list((await entered(store, "long")).records[0].generated_ids) == [1, 2, 3]
        assert store.counts.unwritten > 0
    logged = [record.getMessage() for record in caplog.records if "stored" in record.getMessage()]
    assert len(logged) == 2
    assert "full" in logged[0]


async def test_file_is_reopened_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.05)
    write, close = AnswerFile.write, AnswerFile.close
    closed: list[AnswerFile] = []
    written: list[AnswerFile] = []

    def failing_at_first(file: AnswerFile, rows: Any) -> None:
        if not closed:
            raise sqlite3.OperationalError("disk I/O error")
        written.append(file)
        write(file, rows)

    def counted(file: AnswerFile) -> None:
        closed.append(file)
        close(file)

    monkeypatch.setattr(AnswerFile, "write", failing_at_first)
    monkeypatch.setattr(AnswerFile, "close", counted)
    async with running(tmp_path / "ledger") as store:
        entry = await entered(store)
        grow(entry.records[0], 1)
        await until(lambda: len(closed) == 1)
        grow(entry.records[0], 2)
        await until_written(tmp_path / "ledger", entry)
        store.leave(entry)
    assert written[-1] in closed


async def test_folder_created_later_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(store_module, "PRUNE_EVERY_S", 0.02)
    opened = LedgerStore._opened
    missing = True

    def opened_later(store: LedgerStore) -> AnswerFile:
        if missing:
            raise OSError("the folder is not mounted")
        return opened(store)

    monkeypatch.setattr(LedgerStore, "_opened", opened_later)
    async with running(tmp_path / "ledger") as store:
        await until(lambda: store.failing == "the folder is not mounted")
        missing = False
        entry = await entered(store)
        grow(entry.records[0], 1)
        await until_written(tmp_path / "ledger", entry)
        store.leave(entry)


async def test_idle_writer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_S", 0.01)
    monkeypatch.setattr(store_module, "PRUNE_EVERY_S", 3600.0)  # only orders and the shutdown wake it
    rounds: list[int] = []
    write = LedgerStore._write

    def counted(store: LedgerStore, file: AnswerFile, orders: Any) -> bool:
        rounds.append(len(orders))
        return write(store, file, orders)

    monkeypatch.setattr(LedgerStore, "_write", counted)
    async with running(tmp_path / "ledger") as store:
        entry = await entered(store)
        grow(entry.records[0], 1)
        await until(lambda: sum(rounds) > 0)
        store.leave(entry)
        await asyncio.sleep(0.5)
        assert len(rounds) < 10


async def test_requests_run_without_a_usable_ledger(tmp_path: Path) -> None:
    async with running(tmp_path / "nowhere" / "ledger") as store:
        assert store.failing
        ask = read_completion_request(
            CompletionEndpoint.COMPLETIONS, BODY, request_id="r", group="", tag="", default_model="m", now_s=0.0
        )
        assert await store.enter(ask, BODY) is None
        assert store.used_bytes is None


def row(name: str, written_s: float, size: int = 100) -> AnswerRow:
    ask = read_completion_request(
        CompletionEndpoint.COMPLETIONS, BODY, request_id=name, group="", tag="", default_model="m", now_s=0.0
    )
    grow(ask.records[0], *range(size))
    piece = RecordCutter(0, ask.records[0], prompt_wanted=True).cut()
    assert piece is not None
    return AnswerRow(key_of(name), written_s, NamedRequest(name, b"", 0.0), piece)


def test_pruning_removes_old_but_not_claimed_requests(tmp_path: Path) -> None:
    claims = RequestClaims(tmp_path / "claims")
    in_hand = RequestClaims(tmp_path / "claims")
    with closing(AnswerFile(tmp_path / "ledger")) as file:
        file.write(row(f"r{index}", written_s=float(index)) for index in range(1000))
        file.write([row("r3", written_s=999.0)])  # it has grown since then
        assert in_hand.take(key_of("r5"))
        assert file.prune(700.0, 1 << 30, claims.take, claims.free) == 698
        kept = [index for index in range(1000) if file.has(key_of(f"r{index}"))]
        assert kept == [3, 5, *range(700, 1000)]
        in_hand.free(key_of("r5"))
        assert file.prune(700.0, 1 << 30, claims.take, claims.free) == 1
    claims.close()
    in_hand.close()


def test_file_stays_within_its_size_and_frees_space(tmp_path: Path) -> None:
    claims = RequestClaims(tmp_path / "claims")
    most_bytes = 2 << 20
    with closing(AnswerFile(tmp_path / "ledger")) as file:
        for batch in range(20):
            file.write(row(f"r{batch}-{index}", written_s=0.0, size=2000) for index in range(20))
            file.prune(-1.0, most_bytes, claims.take, claims.free)
            assert file.used_bytes <= most_bytes
        assert file.has(key_of("r19-19"))
        assert not file.has(key_of("r0-0"))
    assert (tmp_path / "ledger").stat().st_size <= 2 * most_bytes
    claims.close()


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_intact_after_a_crash_at_any_batch(tmp_path: Path, seed: int) -> None:
    """A crash is simulated by a copy of the files between two batches."""
    chance = random.Random(seed)
    records = {}
    for name in "abcd":
        ask = read_completion_request(
            CompletionEndpoint.COMPLETIONS, BODY, request_id=name, group="", tag="", default_model="m", now_s=0.0
        )
        records[name] = ask.records[0]
    cutters = {name: RecordCutter(0, record, prompt_wanted=True) for name, record in records.items()}
    written = dict.fromkeys(records, 0)
    with closing(AnswerFile(tmp_path / "ledger")) as file:
        for batch in range(12):
            rows = []
            for name in chance.sample(sorted(records), 3):
                grow(records[name], *(chance.randrange(1000) for _ in range(chance.randrange(1, 200))))
                piece = cutters[name].cut()
                assert piece is not None
                rows.append(
                    AnswerRow(key_of(name), 0.0, NamedRequest(name, b"d", 0.0) if piece.number == 0 else None, piece)
                )
            file.write(rows)
            written.update({name: len(record.generated_ids) for name, record in records.items()})
            crashed = tmp_path / f"crashed{batch}"
            crashed.mkdir()
            for part in tmp_path.glob("ledger*"):
                shutil.copy(part, crashed / part.name)
            with closing(AnswerFile(crashed / "ledger")) as left:
                for name, record in records.items():
                    asked, pieces = left.read(key_of(name), name)
                    ids = list(put_together(pieces)[0].ids) if asked is not None else []
                    assert ids == list(record.generated_ids[: len(ids)])
                    assert len(ids) == written[name]


def test_file_that_is_not_a_ledger_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("dear diary, " * 1000)
    with pytest.raises(Permanent, match="not a ledger"):
        check(tmp_path / "text")
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE t (x)")
    with pytest.raises(Permanent, match="is not a gateway's ledger"):
        check(tmp_path / "other")
    with pytest.raises(Permanent, match="unable to open"):
        check(tmp_path / "nowhere" / "ledger")
    check(tmp_path / "new")
    check(tmp_path / "new")


def test_claim_has_one_holder(tmp_path: Path) -> None:
    one, other = RequestClaims(tmp_path / "claims"), RequestClaims(tmp_path / "claims")
    keys = [key_of(str(number)) for number in range(2000)] + [2**63 - 1, 0]
    assert all(one.take(key) for key in keys)
    assert not any(one.take(key) or other.take(key) for key in keys)
    for key in keys:
        one.free(key)
    assert all(other.take(key) for key in keys)
    other.close()
    assert all(one.take(key) for key in keys)
    one.close()


def test_all_invalid_flags_are_reported_at_once(tmp_path: Path) -> None:
    flags = ["--engine", "e0=http://127.0.0.1:1", "--ledger", str(tmp_path / "nowhere" / "ledger")]
    result = CliRunner().invoke(application(), ["gateway", *flags])
    assert result.exit_code == 2
    assert "--ledger" in result.stderr
    flags += ["--keep-answers-s", "0", "--keep-answers-mb", "nan", "--keep-from-s", "-1"]
    result = CliRunner().invoke(application(), ["gateway", *flags])
    assert result.exit_code == 2
    for name in ("--keep-answers-s", "--keep-answers-mb", "--keep-from-s"):
        assert f"{name}: must be" in result.stderr
