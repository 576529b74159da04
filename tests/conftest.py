"""Environment of all tests: 8 simulated CPU devices, strict dtype promotion, shared caches.

XLA_FLAGS of the caller are kept, so `XLA_FLAGS=--xla_cpu_max_isa=AVX2 pytest` tests what a
processor without AVX-512 computes.
"""

import contextlib
import gc
import importlib.metadata
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Before JAX is imported: the number of devices cannot be changed afterwards.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# PyTorch's threads wait busily for each other, which is slow with toy sizes on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where Python shall write no byte code, each worker and each program that a test starts would
# compile JAX, PyTorch and the tests from their sources, for some 6 s.
_own_byte_code = None
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    _own_byte_code = tempfile.mkdtemp(prefix="flaxformer_mt-byte-code-")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = _own_byte_code
    sys.dont_write_bytecode = False

# Workers of one test run, and the programs that its tests start, share their compiled programs in a
# folder that is deleted at the end. They inherit the variable from the process that makes it.
_own_cache = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _own_cache = tempfile.mkdtemp(prefix="flaxformer_mt-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _own_cache
    # Reading a program back takes some 10 ms, as does compiling a very small one.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Most tests compile many programs and compute next to nothing; `usual_optimizations` is for the
# others. `JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` compiles everything as users do.
if os.environ.setdefault(
    "JAX_DISABLE_MOST_OPTIMIZATIONS", "1"
) == "1" and importlib.metadata.version("jaxlib").startswith("0.10."):
    # The emitters of fused loops take half of XLA's time to compile. Later versions have no such
    # flag, and exit where one is unknown.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# Tracing makes many objects that live long: collecting as often as by default takes a tenth of the
# time.
gc.set_threshold(50_000, 20, 100)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
# The first call of a function may compile it, on a machine that may be busy.
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")
# Before these packages are imported: users do not pay for the checks.
jaxtyping.install_import_hook(
    ["flaxformer_mt.model", "flaxformer_mt.objectives", "flaxformer_mt.decoding.search"],
    "shape_checks.checked",
)


# Tests and fixtures that may take more than `--max-cpu-seconds=3`: they compile what the tests
# after them use, or start processes.
EXPENSIVE = frozenset(
    [
        "test_promises.py::run",
        "test_promises.py::test_a_folder_of_each_format_survives",
        "test_promises.py::test_a_published_model_has_the_same_values_and_gradients",
        "test_promises.py::test_a_run_that_is_killed_continues_to_the_same_bits",
        "test_promises.py::test_a_wide_beam_finds_the_best_of_all_hypotheses",
        "test_promises.py::test_many_devices_train_like_one",
        "test_promises.py::test_packed_sentences_are_trained_like_separate_ones",
        "test_promises.py::test_the_whole_pipeline_learns",
        "test_promises.py::test_translations_are_those_of_generate",
        "trained_run",
        "test_alignments.py::test_links_survive_filters_hold_out_duplicates_and_packing",
        "test_attention_command.py::test_the_page_of_a_sentence_and_its_translation",
        "test_block_workers.py::test_batches_are_the_same_with_any_number_of_workers",
        "test_block_workers.py::test_batches_go_on_when_workers_are_killed",
        "test_changed_vocabulary.py::test_marian_learns_a_language_code",
        "test_checkpoint.py::faults",
        "test_checkpoints_of_any_tree.py::test_a_saved_run_is_a_run_folder",
        "test_cli.py::test_interrupted_and_shared_translations_equal_a_whole_one",
        "test_cli.py::test_translate_keeps_line_structure",
        "test_continuous_batching.py::test_results_do_not_depend_on_order_or_other_sentences",
        "test_convert.py::test_the_published_model_of_the_other_family_computes_the_same",
        "test_convert_files.py::test_adam_is_converted_where_tensors_are_rearranged",
        "test_devices.py::test_pmap_agrees_with_one_device",
        "test_functional.py::test_attention_is_its_equation",
        "test_fused_attention.py::test_equals_the_einsum_and_its_gradients",
        "test_grouped_queries.py::test_kernels_equal_the_einsum",
        "test_hub_folders.py::test_each_sentence_can_have_its_languages",
        "test_jax_export.py::exported",
        "test_jax_export.py::test_a_line_that_the_server_cannot_translate_loses_no_other",
        "test_linear.py::test_a_changed_map_is_changed_in_cached_steps",
        "test_loading.py::test_run_folders_and_folders_of_opus_mt",
        "test_phrase_constraints.py::test_a_wide_beam_finds_the_best_with_all_phrases",
        "test_sampling.py::test_sequences_are_drawn_with_their_probabilities",
        "test_scoring.py::test_scores_are_those_of_the_full_pass_of_each_pair",
        "test_serving.py::test_it_answers_as_openai_does",
        "test_sharding.py::test_bytes_of_a_device_shrink_as_the_rules_say",
        "test_step.py::test_gpus_compute_the_same_update_where_they_write_it",
        "test_step.py::test_parts_and_devices_drop_different_units",
        "test_training_samples.py::test_log_probabilities_are_those_of_the_full_pass",
        "test_translate_function.py::test_sharded_parameters_are_gathered",
        "test_translator.py::test_long_input_is_split",
        "test_warm_start.py::test_with_its_moments_a_run_goes_on_as_if_it_had_not_ended",
    ]
)


def pytest_addoption(parser):
    parser.addoption(
        "--max-cpu-seconds",
        type=float,
        metavar="SECONDS",
        help="fail each test, and each fixture, that takes more processor time, of this process "
        "and of those that it waits for, unless it is slow or EXPENSIVE of tests/conftest.py lists "
        "it. For whoever adds tests: by default no run fails because a machine is slow, or because "
        "a test is the first that compiles a program",
    )


@contextlib.contextmanager
def _limited(request, name):
    """Fails if what is done here takes more processor time than the option of the run allows."""
    limit = request.config.option.max_cpu_seconds
    before = sum(os.times()[:4])
    yield
    spent = sum(os.times()[:4]) - before
    if limit is not None and spent > limit and name not in EXPENSIVE:
        pytest.fail(f"{name} took {spent:.1f} s of processor time, more than {limit:g} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if item.get_closest_marker("slow"):
        return (yield)
    with _limited(item, f"{item.path.name}::{item.name.partition('[')[0]}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    name = f"{request.path.name}::" if fixturedef.scope != "session" else ""
    with _limited(request, name + fixturedef.argname):
        return (yield)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Lets each worker begin with files of its own, and take over tests when it has no more.

    Tests of a file mostly use the same compiled programs and fixtures.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Puts the promises first, and marks what `slow_except` does not name as slow."""
    items.sort(key=lambda item: item.path.name != "test_promises.py")
    unused = {}
    for item in items:
        for marker in item.iter_markers("slow_except"):
            test = item.nodeid.partition("[")[0]
            unused.setdefault(test, set(marker.args)).discard(item.callspec.id)
            if item.callspec.id not in marker.args:
                item.add_marker(pytest.mark.slow)
    # A single test may be asked for by its id.
    if len(items) > len(unused):
        for test, ids in unused.items():
            assert not ids, f"{test}: slow_except names parameters that do not exist: {ids}"


def pytest_collection_finish():
    """Spares garbage collections all that was imported, which stays until the end."""
    gc.freeze()


_teardowns = itertools.count(1)


def pytest_runtest_teardown(item):
    """Drops compiled programs before their memory maps reach the limit of a process, 65,530.

    Beyond it, the compiler crashes. Counting takes some 10 ms, so it is not done after every test.
    """
    maps = Path("/proc/self/maps")
    is_slow = bool(item.get_closest_marker("slow"))
    if (is_slow or next(_teardowns) % 20 == 0) and maps.exists():
        with maps.open() as lines:
            if sum(1 for _ in lines) > (30_000 if is_slow else 45_000):
                jax.clear_caches()


def pytest_unconfigure():
    """Deletes the caches of this test run."""
    for folder in (_own_cache, _own_byte_code):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def usual_optimizations():
    """Compiles a module's programs as users do: it computes much, or represents the others."""
    disabled = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", disabled)


@pytest.fixture
def gpu_kernels_by_einsum():
    """Lets models on CPUs use kernels for GPUs, whose place other functions take."""
    from tests.backends import replace_gpu_kernels

    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_gpu_kernels(monkeypatch)
        yield


@pytest.fixture
def float64():
    """Enables float64 in JAX during one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Run folder of a tiny trained model with Marian's architecture; copy it to change it."""
    from trained_run import shared_folder, trained_once  # Imports all of train.py.

    return trained_once(shared_folder(tmp_path_factory))
