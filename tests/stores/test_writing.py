"""Folders that are sent to a real S3 server: what is there is not sent again, the last file comes last, and faults."""

import contextlib
import socket
import threading

import pytest

from data.s3_server import DENIED, SECRET, behind_tls, objects, use_server
from fitune.errors import DataError, StoreError
from fitune.stores import opening, reading, writing
from fitune.stores.writing import Store
from optional_libraries import NEEDS_S3

pytestmark = NEEDS_S3

FILES = {"one.bin": b"1" * 200_000, "two.bin": b"2" * 100_000, "state.json": b"{}", "COMMIT": b"all"}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def store(bucket):
    return Store(f"s3://{bucket}/x")


def put(store, folder):
    return store.put_folder(folder, "step-1", FILES, last="COMMIT")


def holds_all(bucket, name="x"):
    return objects(bucket) == {f"{name}/step-1/{file}": content for file, content in FILES.items()}


def sent(wire):
    """Names of the files that were sent, in their order."""
    lines = [line.decode().split() for line in wire.requests if line.startswith((b"PUT", b"POST"))]
    return [line[1].partition("?")[0].rpartition("/")[2] for line in lines]


def refusal(store, words, ask=Store.require_writable, *rest):
    """The error's text and hint, none of which says the secret."""
    with pytest.raises(StoreError, match=words) as refused:
        ask(store, *rest)
    assert SECRET not in f"{refused.value.message} {refused.value.hint}"
    return refused.value.message, str(refused.value.hint)


def test_a_folder_is_sent_once_and_its_last_file_last(wire, bucket, store, folder):
    assert put(store, folder) == SIZE
    assert holds_all(bucket)
    assert sorted(sent(wire)) == sorted(FILES)
    assert sent(wire)[-1] == "COMMIT"
    wire.requests.clear()
    assert put(store, folder) == 0
    assert sent(wire) == []


UNSIGNED = b"x-amz-content-sha256: unsigned-payload"


def test_what_is_sent_is_the_file_alone_and_over_https_not_hashed_again_for_its_signature(
    wire, bucket, store, folder, tmp_path, monkeypatch
):
    """As every store of this kind takes it. Over http nothing else says that it was not changed on the way."""
    wire.headers.clear()
    put(store, folder)
    assert len(wire.headers) > len(FILES)
    assert not [head for head in wire.headers if b"aws-chunked" in head or b"x-amz-checksum" in head]
    assert not [head for head in wire.headers if UNSIGNED in head]
    with behind_tls(wire, tmp_path / "certificate.pem") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
        put(Store(f"s3://{bucket}/y"), folder)
    assert len([head for head in wire.headers if UNSIGNED in head]) >= len(FILES)
    use_server(wire, monkeypatch)
    assert {name: objects(bucket)[f"y/step-1/{name}"] for name in FILES} == FILES


@pytest.mark.parametrize("changed", [True, False], ids=["a file", "nothing here"])
def test_a_changed_folder_loses_its_last_file_first_and_only_the_change_is_sent(
    wire, bucket, store, folder, changed
):
    """Also where nothing but a file too many is there."""
    put(store, folder)
    if changed:
        (folder / "two.bin").write_bytes(b"3" * 100_000)
    store.write("step-1/of-another-rank.bin", b"left over")
    wire.requests.clear()
    assert put(store, folder) == changed * 100_000 + len(FILES["COMMIT"])
    assert sent(wire) == ["two.bin", "COMMIT"][not changed :]
    first = next(line for line in wire.requests if line.startswith((b"PUT", b"DELETE")))
    assert first.startswith(b"DELETE")
    assert b"COMMIT" in first
    assert set(objects(bucket)) == {f"x/step-1/{name}" for name in FILES}


@pytest.mark.parametrize(
    ("fault", "afterwards"),
    [
        ({"refused": 2}, {"refused": 0}),  # busy twice: the third try gets it
        ({"cut_sent_after": 120_000}, {"cut_sent_after": None}),  # in the middle of a file
        ({"slow_s": 0.005}, {}),
    ],
)
def test_a_fault_of_the_link_only_takes_longer(wire, bucket, store, folder, fault, afterwards):
    vars(wire).update(fault)
    put(store, folder)
    assert vars(wire).items() >= afterwards.items()
    assert holds_all(bucket)


def test_a_store_that_stays_away_gets_no_last_file_and_the_rest_later(wire, bucket, store, folder):
    wire.cut_sent_after, wire.is_down = 1, True
    refusal(store, "cannot be", put, folder)
    wire.is_down = False
    assert "x/step-1/COMMIT" not in objects(bucket)
    put(store, folder)
    assert holds_all(bucket)


def test_files_that_killed_uploads_left_are_not_sent_again(wire, store, folder):
    store.put_folder(folder, "step-1", ["one.bin"], keeps_others=True)
    wire.requests.clear()
    assert put(store, folder) == SIZE - len(FILES["one.bin"])
    assert "one.bin" not in sent(wire)


def test_a_large_file_is_sent_in_parts_and_known_by_the_hash_of_its_parts(
    bucket, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(reading, "_PART_BYTES", 5 * 2**20)
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(range(256)) * 2**12 * 11)  # 11 MiB: parts of 5, 5 and 1
    monkeypatch.setattr(Store, "_reads_as", lambda *_: pytest.fail("read back, though the store gave a hash"))
    assert store.put_folder(tmp_path, "big", ["large.bin"]) == 11 * 2**20
    assert store.put_folder(tmp_path, "big", ["large.bin"]) == 0
    assert store.infos("big")["large.bin"]["ETag"].strip('"').endswith("-3")
    assert objects(bucket)["x/big/large.bin"] == file.read_bytes()


def test_where_the_store_gives_no_hash_the_file_is_read_back(store, folder, monkeypatch):
    monkeypatch.setattr(writing, "is_same", lambda file, said: None)
    put(store, folder)
    assert put(store, folder) == 0
    store.write("step-1/two.bin", b"4" * 100_000)
    assert put(store, folder) == 100_000 + len(FILES["COMMIT"])


def test_what_a_run_needs_is_asked_for_by_a_small_file(wire, bucket, store):
    store.require_writable()
    assert objects(bucket) == {}
    refusal(Store("s3://not-there/x"), "nothing there: no such file, folder or bucket")
    wire.refused, wire.refusal = 1, DENIED
    refusal(store, "does not let you write it")


def test_the_small_file_goes_where_it_is_not_read_back_as_it_was(bucket, store, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.cat_file", lambda self, path, **words: b"another")
    refusal(store, "does not hold what was written")
    assert objects(bucket) == {}


def test_credentials_that_are_absent_are_named(store, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "AWS_ACCESS_KEY_ID" in refusal(store, "no credentials for s3://")[1]


@pytest.mark.parametrize(
    ("url", "words", "hint"),
    [
        ("S3://bucket/x", "S3:// addresses are not opened", "did you mean 's3'"),
        ("s3:///bucket/x", "names no bucket", "s3://BUCKET/folder"),
        ("ftp:///x", "names no host", "ftp://HOST/folder"),
        ("s3://bucket/runs/../x", "'..' is a name like others", "without '..'"),
        ("memory://host/x", "memory:// addresses are not opened", ""),
        ("http://example.com/x", "http:// addresses are not opened", "a folder, or s3://"),
        ("https://example.com/x", "https:// addresses are not opened", "a folder, or s3://"),
        ("s3://bucket/x?versionId=3", "'?' may not stand in a folder's URL", "s3://bucket/x"),
    ],
)  # fmt: skip
def test_urls_that_name_no_store_are_refused_before_they_are_asked(url, words, hint):
    with pytest.raises(StoreError) as refused:
        Store(url)
    assert words in refused.value.message
    assert hint in str(refused.value.hint)
    assert ("did you mean" in hint) == ("did you mean" in str(refused.value.hint))


def test_names_with_spaces_and_other_scripts_are_kept(bucket, folder):
    name = "my runs/größe 模型"
    store = Store(f"s3://{bucket}/{name}/")
    put(store, folder)
    assert holds_all(bucket, name)
    assert put(store, folder) == 0


@pytest.fixture
def listening(monkeypatch):
    """Puts a server in the place of the store: every connection gets this answer, or none. Returns its address."""
    from s3fs import S3FileSystem

    server, kept = socket.create_server(("127.0.0.1", 0)), []

    def serve(answer):
        with contextlib.suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                if answer:
                    kept[-1].recv(65_536)
                    kept[-1].sendall(answer)
                    kept[-1].close()

    def begin(answer):
        threading.Thread(target=serve, args=(answer,), daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        S3FileSystem.clear_instance_cache()
        return address

    yield begin
    server.close()


def test_a_server_that_never_answers_is_not_waited_for(store, listening, monkeypatch):
    monkeypatch.setattr(opening, "ANSWER_S", 0.3)
    address = listening(b"")
    said = f"^{store.url}: the store did not answer within 0.3 s"
    assert f"AWS_ENDPOINT_URL = {address}" in refusal(store, said)[1]
    with pytest.raises(DataError, match="did not answer within"):
        reading.look_up(f"{store.url}/rows.jsonl", is_pattern=False)


MANY = [f"{number}.bin" for number in range(20)]
"""More than are sent at once."""


def test_a_store_that_falls_silent_is_given_up_with_what_was_sent_and_asked_again_later(
    wire, bucket, store, folder, monkeypatch
):
    store.put_folder(folder, "", ["one.bin"], keeps_others=True)
    monkeypatch.setattr(opening, "SILENT_S", 0.2)
    monkeypatch.setattr(opening, "ANSWER_S", 0.2)
    for name in MANY:
        (folder / name).write_bytes(b"5" * 3_000)
    wire.is_silent = True
    with monkeypatch.context() as listed:
        listed.setattr(store, "infos", lambda _name: {})  # it falls silent after its list
        said = r"nothing was heard of the store for 0.2 s, after 195.3 KiB in whole files"
        _, hint = refusal(store, said, Store.put_folder, folder, "more", MANY)  # each would be waited for
    assert "AWS_ENDPOINT_URL = " in hint
    refusal(store, "did not answer within 0.2 s", put, folder)
    wire.is_silent = False
    monkeypatch.setattr(opening, "ANSWER_S", 30)
    put(store, folder)
    assert {f"x/step-1/{name}" for name in FILES} <= objects(bucket).keys()


def test_a_folder_is_fetched_no_further_from_a_store_that_fell_silent(wire, store, tmp_path, monkeypatch):
    store.write("many/0.bin", b"6" * 3_000)
    [there] = store.infos("many").values()
    monkeypatch.setattr(
        store, "infos", lambda _name: dict.fromkeys(MANY, there)
    )  # it falls silent after its list
    for limit in ("SILENT_S", "ANSWER_S"):
        monkeypatch.setattr(opening, limit, 0.2)
    opened = []
    monkeypatch.setattr(
        writing, "open_stream", lambda url, **how: opened.append(url) or reading.open_stream(url, **how)
    )
    wire.is_silent = True
    refusal(store, "nothing was heard of the store", Store.get_folder, "many", tmp_path)
    wire.is_silent = False
    assert len(opened) < len(MANY)  # each would be waited for


def test_a_slow_part_is_waited_for_and_not_for_ever(wire, store, folder, monkeypatch):
    store.require_writable()
    monkeypatch.setattr(opening, "SILENT_S", 20.0)
    wire.slow_s = 0.1
    put(store, folder)
    monkeypatch.setattr(opening, "SILENT_S", 0.05)
    wire.slow_s = 0.2
    refusal(store, "nothing was heard", Store.put_folder, folder, "again", ["one.bin"])


def test_a_page_in_place_of_a_store_is_named_with_the_address(store, listening):
    page = b"<html>Welcome</html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: "
    address = listening(head + str(len(page)).encode() + b"\r\n\r\n" + page)
    _, hint = refusal(store, f"^{store.url}: cannot be written")
    assert f"AWS_ENDPOINT_URL = {address}" in hint
