"""Tokenised data in an S3 server: made by one machine, read by the others; half or damaged entries are made again."""

from importlib import import_module

import pytest

from data.s3_server import DENIED, SECRET, client, objects
from fitune.data.tokenising import RowTokeniser
from fitune.errors import StoreError
from fitune.stores.writing import Store
from jsonl import write_lines
from optional_libraries import NEEDS_S3

pytestmark = NEEDS_S3


@pytest.fixture
def on(bucket, tmp_path, monkeypatch, prepare):
    """The data as a machine of this name prepares it, and its notes; ``tokenises`` False: it may not."""
    rows = ({"prompt": f"what is {i}?", "completion": f"it is {i}"} for i in range(60))
    file = write_lines(tmp_path / "rows.jsonl", rows)

    def run(machine, *, tokenises=True, **settings):
        notes = []
        with monkeypatch.context() as patched:
            patched.setenv("FITUNE_CACHE", str(tmp_path / machine))
            if not tokenises:
                patched.setattr(RowTokeniser, "__call__", lambda self, _: pytest.fail("tokenised again"))
            settings = {"cache_dir": f"s3://{bucket}/shared/", "val_fraction": 0.2} | settings
            return prepare(file, on_note=notes.append, **settings), notes

    return run


def only(bucket, ending):
    (name,) = [name for name in objects(bucket) if name.endswith(ending)]
    return name


def test_one_machine_tokenises_and_the_others_fetch(wire, bucket, on, tmp_path):
    first, (sent,) = on("one")
    assert sent.startswith(f"the tokenised data is in s3://{bucket}/shared/tokens/")
    (entry,) = (tmp_path / "one/tokens").iterdir()
    assert objects(bucket) == {
        f"shared/tokens/{entry.name}/{file.relative_to(entry)}": file.read_bytes()
        for file in entry.rglob("*")
        if file.is_file()
    }
    puts = [line for line in wire.requests if line.startswith(b"PUT")]
    assert b"manifest.json" in puts[-1]
    wire.requests.clear()
    other, (fetched,) = on("other", tokenises=False)
    assert fetched.startswith(f"the tokenised data is fetched from s3://{bucket}/shared/tokens/")
    assert [other.train.fingerprint, other.eval.fingerprint, other.train_ledger, other.eval_examples] == [
        first.train.fingerprint, first.eval.fingerprint, first.train_ledger, first.eval_examples
    ]  # fmt: skip
    assert on("other", tokenises=False)[1] == []
    assert not [line for line in wire.requests if line.startswith((b"PUT", b"POST", b"DELETE"))]


def test_an_entry_without_its_manifest_does_not_count_and_is_made_whole(bucket, on):
    on("one")
    whole, manifest = objects(bucket), only(bucket, "manifest.json")
    client().delete_object(Bucket=bucket, Key=manifest)
    _, (sent,) = on("other")
    assert "is in s3://" in sent
    assert set(objects(bucket)) == set(whole)


def test_a_damaged_entry_is_named_made_again_and_replaced(bucket, on):
    first, _ = on("one")
    whole, name = objects(bucket), only(bucket, "train/ids")
    changed = whole[name][:-1] + bytes([whole[name][-1] ^ 1])
    client().put_object(Bucket=bucket, Key=name, Body=changed)
    other, (damaged, sent) = on("other")
    assert "is damaged (train/ids was changed): it is made here" in damaged
    assert "is in s3://" in sent
    assert other.train.fingerprint == first.train.fingerprint
    assert objects(bucket)[name] == whole[name]
    assert on("third", tokenises=False)[1][0].startswith("the tokenised data is fetched")


def test_what_only_this_machine_has_is_sent_by_the_process_that_may(wire, bucket, on, monkeypatch):
    def denied_from_now(_store):
        wire.refused, wire.refusal = 50, DENIED

    with monkeypatch.context() as failing:
        failing.setattr(Store, "require_writable", denied_from_now)
        _, (refused,) = on("one")
    assert "is not in s3://" in refused
    assert "goes on with that of this machine" in refused
    assert SECRET not in refused
    wire.refused = 0
    assert on("one", tokenises=False, sends=False)[1] == []
    assert objects(bucket) == {}
    assert "is in s3://" in on("one", tokenises=False)[1][0]


def test_a_bucket_that_is_missing_read_only_or_without_credentials_is_an_error_before_anything_is_tokenised(
    wire, bucket, on, monkeypatch
):
    with pytest.raises(
        StoreError, match=r"^cache_dir: s3://not-there/x: nothing there: no such file, folder or"
    ):
        on("one", tokenises=False, cache_dir="s3://not-there/x")
    wire.refused, wire.refusal = 50, DENIED
    with pytest.raises(StoreError, match=r"^cache_dir: s3://.*/shared: the store does not let you write it"):
        on("one", tokenises=False)
    wire.refused = 0
    on("one")
    wire.refused = 50
    assert "is fetched" in on("other", tokenises=False)[1][0], "it is only read there"
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    import_module("s3fs").S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match=r"^cache_dir: s3://.*no credentials for s3://"):
        on("third", tokenises=False)


def test_a_stop_while_it_is_fetched_leaves_nothing_half_made(wire, on, tmp_path):
    on("one")
    told = []

    def watch(reading):
        told.append(reading)
        if reading.doing == "tokenising":
            raise KeyboardInterrupt

    wire.slow_s = 0.03
    with pytest.raises(KeyboardInterrupt):
        on("other", tokenises=False, watch=watch)
    assert list((tmp_path / "other/tokens").iterdir()) == []
