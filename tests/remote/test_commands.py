"""Every command with remote paths does what it does with local ones."""

import re
import shutil

import pytest
from flaxformer_mt.remote.copies import new_copy
from tests.remote.test_copies import contents, downloaded

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import lease, run_folders
from flaxformer_mt.remote.stores import Store
from tests.remote.conftest import forget_copies

LINES = "".join(f"{line}\n" for line in ["three", "Monday, Friday", "six meters"])
TRANSLATE = ["translate", "--run=RUN", "--input", "FILES/source", "--beam-size=1"]
COMMANDS = {
    "translate": [*TRANSLATE, "--output=FILES/out"],
    "a shortlist": [*TRANSLATE, "--shortlist", "FILES/lexicon"],
    "score": ["score", "--run=RUN", "--source=FILES/source", "--target=FILES/source"],
    "evaluate": ["evaluate", "--run", "RUN", "--source=FILES/source", "--reference=FILES/source",
                 "--output=FILES/out"],
    "inspect": ["inspect", "--run=RUN"],
    "average": ["average", "--run=RUN", "--last=1", "--output=FILES/averaged"],
    "average within": ["average", "--run=RUN", "--last=1"],
    "plot": ["plot", "--run=RUN", "--output=FILES/curves.svg"],
    "attention": ["attention", "--run=RUN", "--source=three", "--output=FILES/three.html"],
    "lexicon": ["lexicon", "--run=RUN", "--source=FILES/source", "--target=FILES/source",
                "--output=FILES/new-lexicon"],
    "convert": ["convert", "--from=flaxformer_mt", "--to=marian", "RUN", "FILES/marian"],
    "convert a file": ["convert", "--from=flaxformer_mt", "--to=flaxformer_mt", "RUN",
                       "FILES/weights.safetensors"],
    "prepare": ["prepare", "--path=FILES/text", "--output=FILES/prepared",
                "--source-language=en", "--target-language=de"],
}  # fmt: skip
DEFAULT = ("translate", "average within", "convert a file", "inspect", "lexicon")
# Others have random names inside, or an order that a library chooses.
SAME_BYTES = {"translate", "evaluate", "lexicon", "convert"}


def run(arguments, capfd):
    code = main(arguments)
    forget_copies()
    return code, *capfd.readouterr()


@pytest.mark.slow_except("inspect")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_with_remote_paths(name, uploaded_run, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, folder = uploaded_run
    files, remote = tmp_path / "files", f"{url.rpartition('/')[0]}/files"
    (files / "text").mkdir(parents=True)
    splits = (f"text/{split}.{end}" for split in ("train", "valid", "test") for end in ("en", "de"))
    for path in ("source", *splits):
        (files / path).write_text(LINES)
    (files / "lexicon").write_text("three drei 1\nMonday Montag 1\n")
    with new_copy(remote) as copy:
        shutil.copytree(files, copy.local)
        copy.upload()

    def arguments(run_folder, others):
        return [each.replace("RUN", run_folder).replace("FILES", others) for each in COMMANDS[name]]

    expected = run(arguments(str(folder), str(files)), capfd)
    found = run(arguments(url, remote), capfd)
    assert expected[0] == found[0] == 0, found
    assert _plain(found, tmp_path) == _plain(expected, tmp_path)
    for given, local in ((url, folder), (remote, files)):
        there, here = downloaded(given), contents(local)
        here = {name: content for name, content in here.items() if not name.endswith("lock")}
        assert _structure(there) == _structure(here)
        if name in SAME_BYTES:
            assert there == here


def _plain(result, tmp_path):
    """Returns an output without names of folders, times and sizes that depend on them."""
    code, out, err = result
    text = re.sub(
        rf"s3://\S+?/(folder|files)\b|{tmp_path}/(local/folder|files)\b", "PLACE", out + err
    )
    return code, re.sub(r"\d+\.\d+ ?(s|seconds)", "", text)


def _structure(files):
    """Returns the names of files, those of TensorStore's and of Orbax's without random parts."""
    return {re.sub(r"/d/[0-9a-f]{32}$", "/d/HASH", name) for name in files}


def test_what_is_not_there_is_named_by_its_url(uploaded_run, capfd, tmp_path):
    url, _ = uploaded_run
    code, _, err = run(["inspect", f"--run={url}-none"], capfd)
    assert code == 1
    assert f"there is no run folder {url}-none" in err
    assert str(tmp_path) not in err


@pytest.mark.slow
def test_parts_of_a_remote_output_are_refused(uploaded_run, capfd):
    url, _ = uploaded_run
    for option in ("--resume", "--shard=0/2"):
        arguments = ["translate", f"--run={url}", f"--output={url}/out", option]
        code, _, err = run([*arguments, "--input=README.md"], capfd)
        assert code == 1
        assert f"{option} continues the parts of a local --output: give a local file" in err


@pytest.mark.slow
def test_a_text_that_looks_like_a_path_is_a_text(uploaded_run, capfd):
    url, _ = uploaded_run
    _, _, err = run(["convert", "--from=flaxformer_mt", "--to=flaxformer_mt", url,
                        f"{url}-new", "--add-token", "https://"], capfd)  # fmt: skip
    assert "cannot be used" not in err
    assert "nothing can be written there" not in err


def test_training_continues_and_a_second_process_is_refused(uploaded_run, capfd, monkeypatch):
    monkeypatch.setattr(run_folders, "_PERIOD_SECONDS", 0.5)
    url, _ = uploaded_run
    refused = []

    def another(step, split, metrics):
        refused.append(main(["train", f"--workdir={url}"]))
        return True

    # Without a test, which would translate all of its sentences.
    changes = {"train": {"num_steps": 202, "log_every": 1}, "data": {"test_split": ""}}
    config = with_changes(fmt.Run(url).config, changes)
    trained = fmt.train(config, url, callbacks=[another], accept_changes=True)
    assert refused[0] == 1
    assert f"is training in {url} already" in capfd.readouterr().err
    assert trained.latest_step == 201
    assert lease.LEASE not in Store(url).list()
    assert fmt.load(url).translate("three")


@pytest.mark.parametrize("option", ["--coordinator=a:1", "--find-learning-rate"])
def test_what_needs_a_local_run_folder_is_refused(option, s3_url, capfd):
    code, _, err = run(["train", "--config=quickstart", f"--workdir={s3_url}", option], capfd)
    assert code == 1
    assert option.partition("=")[0] in err
    assert Store(s3_url).list() == {}


def test_a_model_is_saved_remotely(trained_run, s3_url):
    saved = fmt.load(trained_run).save(s3_url)
    assert saved.latest_step == 0
    assert {"config.json", "data.json"} <= downloaded(s3_url).keys()
    with pytest.raises(UserError, match="exists"):
        fmt.load(trained_run).save(s3_url)
