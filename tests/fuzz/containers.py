"""Arrays, vocabularies and checkpoints in valid containers that lie, or ask for much."""

import io
import json
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import tensorstore

from flaxformer_mt.runs.manifest import write_manifest
from fuzz import damage
from fuzz.core import Case, Outcome, accept
from fuzz.foreign_folders import convert, usable
from fuzz.mutations import damage_bytes, mutate_json, replace_file
from fuzz.world import World

SHAPES = ((10**12,), (10**6, 10**6), (-1,), (2**63, 2), (10**30, 0), (), (0,), (3, 7, 150))
DTYPES = ("<f8", "<f4", "<i8", "|O", "V2000000000", "<U9", "<c16", "<M8[s]", ">f4", "x", "[('a', ")
COMPRESSIONS = (
    zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA,
)  # fmt: skip
MEMBERS = ("logits.npy", "source.npy", "", "../x.npy", "logits", "a" * 5000, "\n")


def arrays(rng: random.Random, world: World, folder: Path) -> Case:
    """Values that another program saved, for `parity`."""
    inputs, values = folder / "batch.npz", folder / "saved.npz"
    shutil.copy(world.saved_values / inputs.name, inputs)
    shutil.copy(world.saved_values / values.name, values)
    victim = rng.choice((inputs, values))
    match rng.choice(("damage", "claim", "archive", "flags", "bomb")):
        case "damage":
            content, done = damage_bytes(rng, victim.read_bytes(), b"PK\3\4" + bytes(100))
        case "claim":
            content, done = claim(rng)
        case "archive":
            array, done = claim(rng)
            content = archived(rng.choice(MEMBERS), array, rng.choice(COMPRESSIONS))
        case "flags":
            place = rng.randrange(2, 46)
            content = bytearray(victim.read_bytes())
            content[content.index(b"PK\1\2") + place] ^= rng.randrange(1, 256)
            content, done = bytes(content), f"byte {place} of an entry"
        case _:
            size = rng.choice((10**7, 10**8))
            content = archived("logits.npy", bytes(size), rng.choice(COMPRESSIONS[1:]))
            done = f"{size} zeros"
    changed = content != victim.read_bytes()
    victim.write_bytes(content)
    given = ("parity", "--family=marian", "--checkpoint", str(world.checkpoints["marian pt"]))
    given += ("--set", "num_heads=2", "--inputs", str(inputs), "--logits", str(values))
    return Case(
        f"{done} in {victim.name}",
        given,
        check=lambda outcome: "accepted" if changed and not reads_alike(victim, world) else "",
        names=(str(folder),),
    )


def claim(rng: random.Random) -> tuple[bytes, str]:
    """Returns an .npy file whose header claims what it does not have, and what it claims."""
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    header = f"{{'descr': '{dtype}', 'fortran_order': {rng.random() < 0.5}, 'shape': {shape}}}"
    if rng.random() < 0.2:
        header = rng.choice(("(" * 9000, "-" * 9000 + "1", "1" * 9000, "[" + "[],", ""))
    encoded = header.encode()
    version = rng.choice((b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\x09\0"))
    width = 2 if version == b"\1\0" else 4
    size = len(encoded) if rng.random() < 0.8 else rng.choice((0, 2**15, 2**16 - 1))
    content = b"\x93NUMPY" + version + size.to_bytes(width, "little") + encoded
    return content + bytes(rng.choice((0, 0, 8, 100))), f"{dtype} {shape} {header[:20]}"


def archived(name: str, content: bytes, compression: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(zipfile.ZipInfo(name or "x", (1980, 1, 1, 0, 0, 0)), content, compression)
    return file.getvalue()


def reads_alike(path: Path, world: World) -> bool:
    """Returns whether NumPy reads the intact values of a file."""
    with np.load(path) as ours, np.load(world.saved_values / path.name) as theirs:
        return ours.files == theirs.files and all(
            np.array_equal(ours[name], theirs[name]) for name in ours.files
        )


def vocabulary(rng: random.Random, world: World, folder: Path) -> Case:
    """A folder of the Hugging Face Hub whose `tokenizer.json` is another."""
    source = Path(shutil.copytree(world.hub, folder / "model"))
    path = source / rng.choice(("tokenizer.json",) * 4 + ("tokenizer_config.json",))
    if rng.random() < 0.7:
        text = path.read_text()
        for _ in range(rng.choice((1, 1, 2))):
            values = json.loads(text)
            if path.name == "tokenizer.json" and rng.random() < 0.5:
                part = rng.choice(sorted(values.keys() - {"model"}))
                changed, done, *_ = mutate_json(rng, {part: values[part]})
                # What stands for text that JSON cannot express has its place in a document only.
                text = json.dumps(values).replace(
                    f'"{part}": {json.dumps(values[part])}', changed.strip()[1:-1], 1
                )
            else:
                text, done, *_ = mutate_json(rng, values)
            if not is_json(text):
                break
        content = text.encode(errors="surrogatepass")
    else:
        content, done = damage_bytes(rng, path.read_bytes(), b"{}")
    replace_file(path, content)
    return convert("t5", source, folder, f"{done} in {path.name}", usable(world, folder))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


CHUNKS = ([30_000, 30_000], [1, 1], [0, 0], [-1, 8], [2**40, 2**40], [8], "x", None)
FORMATS = ("<f3", "<f8", "<i4", "|b1", "|O", "bfloat16", "", None, 3)
COMPRESSORS = (None, {"id": "x"}, {"id": "zstd", "level": 10**9}, {"id": "blosc"}, 3)


def hostile_run(rng: random.Random, world: World, folder: Path) -> Case:
    """A run whose checkpoints were rewritten, with a manifest that fits."""
    run = world.copy_run(folder)
    promise, done = "any", ""
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        if (checkpoint / "params").is_dir():
            promise, done = rewrite(random.Random(rng.random()), checkpoint)
    command = rng.choice(("translate", "score", "inspect", "average", "convert", "continue"))
    return Case(
        done,
        damage.arguments(command, world, run, folder),
        check=lambda outcome: judged(promise, command, world, run, folder, outcome),
        names=("checkpoints", str(run)),
        may_write=command == "continue",
    )


def rewrite(rng: random.Random, checkpoint: Path) -> tuple[str, str]:
    """Changes an array of a checkpoint; returns what is promised of it, and what was done."""
    base = checkpoint / rng.choice(
        [name for name in ("params", "ema") if (checkpoint / name).is_dir()]
    )
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{base}/"}).result()
    keys = [key.decode() for key in store.list().result()]
    metadata = [key for key in keys if key.endswith(".zarray")]
    chunks = [key for key in keys if "/" in key and not key.endswith(".zarray")]
    way = rng.choice(("field", "field", "missing", "short", "noise", "metadata", "file"))
    promise = "same"
    if way == "file":
        path = rng.choice(sorted(path for path in checkpoint.rglob("_*") if path.is_file()))
        if path.read_bytes().startswith(b"{"):
            text, done, *_ = mutate_json(rng, json.loads(path.read_text()))
            replace_file(path, text.encode(errors="surrogatepass"))
        else:
            content, done = damage_bytes(rng, path.read_bytes())
            replace_file(path, content)
        done = f"{done} in {path.name}"
    elif way == "field":
        key = rng.choice(metadata)
        values = json.loads(store.read(key).result().value)
        field, options = rng.choice(
            (("chunks", CHUNKS), ("shape", CHUNKS), ("dtype", FORMATS), ("compressor", COMPRESSORS),
             ("order", ("F", "x")), ("fill_value", (1, "x", "NaN")), ("filters", ([{"id": "x"}],)))
        )  # fmt: skip
        values[field] = rng.choice(options)
        store.write(key, json.dumps(values).encode()).result()
        done = f"{field} = {values[field]} in {key}"
        # Values in another order are other values.
        promise = "any" if field == "order" else "same"
    else:
        key = rng.choice(metadata if way == "metadata" else chunks)
        if way == "missing":
            store.write(key, None).result()
        else:
            content = store.read(key).result().value
            new = {"short": content[: len(content) // 2], "noise": rng.randbytes(len(content))}
            store.write(key, new.get(way, b"{")).result()
        done = f"{way}: {key}"
    write_manifest(checkpoint)
    return promise, done


def judged(
    promise: str, command: str, world: World, run: Path, folder: Path, outcome: Outcome
) -> str:
    """Says how a success on rewritten checkpoints is wrong."""
    if promise == "any" or "checkpoints" in outcome.text:
        return accept(outcome)
    if damage.result(command, run, folder, outcome) == damage.baseline(command, world):
        return ""
    return f"{command} gives another result without a word"
