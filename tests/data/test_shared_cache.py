"""Tokenised data in an S3 server: made by one machine, read by the others; half or damaged entries are made again."""

from dataclasses import replace

import pytest

from data.s3_server import DENIED, SECRET, objects
from data.tiny_tokenizers import byte_tokenizer
from fitune.data.preparing import prepare_data
from fitune.data.tokenising import RowTokeniser
from fitune.errors import StoreError
from fitune.spec.plan import DataPlan, DataSource
from fitune.stores.writing import Store
from jsonl import write_lines
from optional_libraries import NEEDS_S3

pytestmark = NEEDS_S3


@pytest.fixture
def prepare(bucket, tmp_path, monkeypatch):
    """The data as a machine of this name prepares it, and its notes; ``tokenises`` False: it may not."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"what is {i}?", "completion": f"it is {i}"} for i in range(60)]
    write_lines(file, rows)
    data = DataPlan(
        sources=(DataSource(path=str(file)),), cache_dir=f"s3://{bucket}/shared/", val_fraction=0.2
    )

    def run(machine, *, tokenises=True, cache_dir=data.cache_dir, **settings):
        notes = []
        with monkeypatch.context() as patched:
            patched.setenv("FITUNE_CACHE", str(tmp_path / machine))
            if not tokenises:
                patched.setattr(RowTokeniser, "__call__", lambda self, _: pytest.fail("tokenised again"))
            prepared = prepare_data(
                replace(data, cache_dir=cache_dir), tokenizer=byte_tokenizer(), tokenizer_path="tiny", seq_len=64,
                seed=1, on_note=notes.append, **settings,
            )  # fmt: skip
        return prepared, notes

    return run


def put(bucket, name, content):
    import boto3

    boto3.client("s3").put_object(Bucket=bucket, Key=name, Body=content)


def remove(bucket, name):
    import boto3

    boto3.client("s3").delete_object(Bucket=bucket, Key=name)


def only(bucket, ending):
    (name,) = [name for name in objects(bucket) if name.endswith(ending)]
    return name


def test_one_machine_tokenises_and_the_others_fetch(wire, bucket, prepare, tmp_path):
    first, (sent,) = prepare("one")
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
    other, (fetched,) = prepare("other", tokenises=False)
    assert fetched.startswith(f"the tokenised data is fetched from s3://{bucket}/shared/tokens/")
    assert (other.train.fingerprint, other.eval.fingerprint) == (
        first.train.fingerprint,
        first.eval.fingerprint,
    )
    assert (other.train_ledger, other.eval_examples) == (first.train_ledger, first.eval_examples)
    assert prepare("other", tokenises=False)[1] == []
    assert not [line for line in wire.requests if line.startswith((b"PUT", b"POST", b"DELETE"))]


def test_an_entry_without_its_manifest_does_not_count_and_is_made_whole(bucket, prepare):
    prepare("one")
    whole, manifest = objects(bucket), only(bucket, "manifest.json")
    remove(bucket, manifest)
    _, (sent,) = prepare("other")
    assert "is in s3://" in sent
    assert set(objects(bucket)) == set(whole)


def test_a_damaged_entry_is_named_made_again_and_replaced(bucket, prepare):
    first, _ = prepare("one")
    whole, name = objects(bucket), only(bucket, "train/ids")
    put(bucket, name, whole[name][:-1] + bytes([whole[name][-1] ^ 1]))
    other, (damaged, sent) = prepare("other")
    assert "is damaged (train/ids was changed): it is made here" in damaged
    assert "is in s3://" in sent
    assert other.train.fingerprint == first.train.fingerprint
    assert objects(bucket)[name] == whole[name]
    assert prepare("third", tokenises=False)[1][0].startswith("the tokenised data is fetched")


def test_what_only_this_machine_has_is_sent_by_the_process_that_may(wire, bucket, prepare, monkeypatch):
    def denied_from_now(_store):
        wire.refused, wire.refusal = 50, DENIED

    with monkeypatch.context() as failing:
        failing.setattr(Store, "require_writable", denied_from_now)
        _, (refused,) = prepare("one")
    assert "is not in s3://" in refused
    assert "goes on with that of this machine" in refused
    assert SECRET not in refused
    wire.refused = 0
    assert prepare("one", tokenises=False, sends=False)[1] == []
    assert objects(bucket) == {}
    assert "is in s3://" in prepare("one", tokenises=False)[1][0]


def test_a_bucket_that_is_missing_or_read_only_is_an_error_before_anything_is_tokenised(
    wire, bucket, prepare
):
    with pytest.raises(
        StoreError, match=r"^cache_dir: s3://not-there/x: nothing there: no such file, folder or"
    ):
        prepare("one", tokenises=False, cache_dir="s3://not-there/x")
    wire.refused, wire.refusal = 50, DENIED
    with pytest.raises(StoreError, match=r"^cache_dir: s3://.*/shared: the store does not let you write it"):
        prepare("one", tokenises=False)
    wire.refused = 0
    prepare("one")
    wire.refused = 50
    assert "is fetched" in prepare("other", tokenises=False)[1][0], "it is only read there"


def test_a_store_that_may_not_be_read_is_an_error_that_names_the_setting(bucket, prepare, monkeypatch):
    import s3fs

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match=r"^cache_dir: s3://.*no credentials for s3://") as refused:
        prepare("one")
    assert "AWS_ACCESS_KEY_ID" in str(refused.value.hint)


def test_a_stop_while_it_is_fetched_leaves_nothing_half_made(wire, prepare, tmp_path):
    prepare("one")
    told = []

    def watch(reading):
        told.append(reading)
        if reading.doing == "tokenising":
            raise KeyboardInterrupt

    wire.slow_s = 0.3
    with pytest.raises(KeyboardInterrupt):
        prepare("other", tokenises=False, watch=watch)
    assert list((tmp_path / "other/tokens").iterdir()) == []
