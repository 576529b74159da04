"""Inputs by URL: verified copies in a private cache, and nothing is changed in the store."""

import http.server
import stat
import threading

import fsspec
import pytest

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_bytes
from flaxformer_mt.remote import reading
from flaxformer_mt.remote.stores import Store
from tests.remote.conftest import contents, forget_copies, objects, upload

LINES = "".join(f"{line}\n" for line in ["three", "Monday, Friday", "six meters"])


def test_a_copy_is_private_downloaded_once_and_equal(store_url, tmp_path, monkeypatch):
    upload(store_url, {"a/b": b"content", "c": b"other"})
    copy = reading.local(store_url)
    assert contents(copy) == {"a/b": b"content", "c": b"other"}
    cache = tmp_path / "xdg" / "flaxformer_mt" / "remote"
    modes = {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode))
        for path in (cache, *cache.rglob("*"))
        if ".partial" not in str(path)
    }
    assert modes == {(True, 0o700), (False, 0o600)}
    forget_copies()
    monkeypatch.setattr(Store, "get", None)
    assert contents(reading.local(store_url)) == {"a/b": b"content", "c": b"other"}


@pytest.mark.parametrize("cut", [True, False])
def test_what_arrives_damaged_is_downloaded_again_and_then_named(s3_url, monkeypatch, cut):
    upload(s3_url, {"file": b"content"})
    get, damaged = Store.get, []

    def damage(store, name, local, *, size):
        result = get(store, name, local, size=size)
        if damaged:
            local.write_bytes(b"conten" if cut else b"CONTENT")
            damaged.pop()
        return result

    monkeypatch.setattr(Store, "get", damage)
    damaged += [1]
    assert read_bytes(f"{s3_url}/file") == b"content"
    forget_copies()
    damaged += [1] * 10
    upload(s3_url, {"file": b"changed"})
    with pytest.raises(UserError, match="6 of 7 bytes" if cut else "differs from its checksum"):
        read_bytes(f"{s3_url}/file")


def test_a_reader_during_an_upload_sees_complete_checkpoints_and_changes_nothing(
    trained_run, s3_url, capfd, tmp_path
):
    files = contents(trained_run)
    steps = sorted({name.split("/")[1] for name in files if name.startswith("checkpoints/")})
    manifest = f"checkpoints/{steps[-1]}/manifest.json"
    missing = f"checkpoints/{int(steps[-1]) + 1}"
    begun = {f"{missing}/{name.split('/', 2)[2]}": files[name] for name in files
             if name.startswith(f"checkpoints/{steps[-1]}/") and name != manifest}  # fmt: skip
    upload(s3_url, files | begun | {"cache/tokens": b"large"})
    before = objects(s3_url)
    for arguments in (
        ["inspect", f"--run={s3_url}"],
        ["plot", f"--run={s3_url}", f"--output={tmp_path}/a.svg"],
    ):
        assert main(arguments) in (0, 1)
        forget_copies()
    run = fmt.Run(s3_url)
    assert [str(each.step) for each in run.checkpoints] == steps
    assert not (run.folder / missing).exists()
    assert not (run.folder / "cache").exists()
    assert objects(s3_url) == before


COMMANDS = {
    "translate": ["translate", "--run=RUN", "--input", "FILES/source", "--beam-size=1"],
    "a shortlist": ["translate", "--run=RUN", "--input", "FILES/source", "--beam-size=1",
                    "--shortlist", "FILES/lexicon"],
    "score": ["score", "--run=RUN", "--source=FILES/source", "--target=FILES/source"],
    "evaluate": ["evaluate", "--run", "RUN", "--source=FILES/source", "--reference=FILES/source",
                 "--output=OUT/out"],
    "inspect": ["inspect", "--run=RUN"],
    "average": ["average", "--run=RUN", "--last=1", "--output=OUT/averaged"],
    "plot": ["plot", "--run=RUN", "--output=OUT/curves.svg"],
    "attention": ["attention", "--run=RUN", "--source=three", "--output=OUT/three.html"],
    "convert": ["convert", "--from=flaxformer_mt", "--to=marian", "RUN", "OUT/marian"],
}  # fmt: skip


@pytest.mark.slow_except("inspect")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_urls_as_local_paths(name, published_run, tmp_path, capfd):
    url, folder = published_run
    files, store = tmp_path / "files", f"{url.rpartition('/')[0]}/files"
    files.mkdir(parents=True)
    (files / "source").write_text(LINES)
    (files / "lexicon").write_text("three drei 1\nMonday Montag 1\n")
    upload(store, contents(files))
    before = objects(url), objects(store)

    def run(run_folder, others, out):
        values = (("RUN", run_folder), ("FILES", others), ("OUT", str(out)))
        arguments = COMMANDS[name]
        for key, value in values:
            arguments = [each.replace(key, value) for each in arguments]
        code = main(arguments)
        forget_copies()
        printed, _ = capfd.readouterr()
        for key, value in values:
            printed = printed.replace(value, key)
        # Orbax gives the files of arrays random names; their number varies.
        written = {name for name in contents(out) if "/d/" not in name} if out.exists() else set()
        return code, printed, written

    expected = run(str(folder), str(files), tmp_path / "expected")
    assert expected[0] == 0
    found = run(url, store, tmp_path / "found")
    assert found[:2] == expected[:2]
    assert found[2] == expected[2]
    assert (objects(url), objects(store)) == before


def test_what_is_not_there_is_named_by_its_url(s3_url, capfd, tmp_path):
    assert main(["inspect", f"--run={s3_url}"]) == 1
    assert f"{s3_url}: there is no such file or folder" in capfd.readouterr().err
    upload(s3_url, {"config.json": b"{"})
    with pytest.raises(UserError, match=f"^{s3_url}/config.json: ") as caught:
        _ = fmt.Run(s3_url).config
    assert str(tmp_path) not in str(caught.value)


def test_a_file_of_the_web(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "text.de").write_text(LINES)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "site"))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            assert read_bytes(f"{url}/text.de") == LINES.encode()
            with pytest.raises(UserError, match=f"^{url}/none: "):
                read_bytes(f"{url}/none")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(UserError, match=f"^{url}/text.de cannot be used: "):
        reading.local(f"{url}/text.de", as_it_is_now=True)


def test_a_cache_that_others_may_write_to_is_refused(s3_url, tmp_path):
    upload(s3_url, {"file": b"content"})
    (tmp_path / "xdg" / "flaxformer_mt").mkdir(parents=True)
    (tmp_path / "xdg" / "flaxformer_mt").chmod(0o777)
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        read_bytes(f"{s3_url}/file")


def test_names_that_lead_out_of_a_folder_are_refused(s3_url):
    fsspec.filesystem("s3").pipe_file(f"{s3_url}/../a", b"content")
    with pytest.raises(UserError, match=r"has a file '.*\.\./a', which is no name of a file here"):
        reading.local(s3_url.rpartition("/")[0])
