"""Models that are served: requests that wait at the same time are translated together."""

import asyncio
import itertools
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from flaxformer_mt.errors import UserError
from flaxformer_mt.run_layout import CheckpointSelector
from flaxformer_mt.run_reader import Run

BATCH_CHARACTERS = 20_000
"""Requests are taken from the queue up to this size together: none waits for many others."""


class Translation(NamedTuple):
    """A translation of a text, with its number of tokens."""

    text: str
    num_tokens: int


class Job(NamedTuple):
    """The lines of one request, which wait to be translated."""

    lines: list[str]
    num_translations: int
    """Of each line."""
    done: "asyncio.Future[list[list[Translation]]]"
    """Done before the job is in a batch if nobody waits for the translations anymore."""

    @property
    def characters(self) -> int:
        """The size of the job in a batch."""
        return sum(max(1, len(line)) for line in self.lines)


class ServedModel:
    """A model, and the requests that wait for it.

    While the translator is busy, requests wait in a queue; those that are there when it has
    finished are translated together. Their translations do not depend on each other.
    """

    def __init__(
        self, run: Run, languages: str | None = None, checkpoint: CheckpointSelector = "best"
    ) -> None:
        """Loads a checkpoint; `languages` are such as "en-de", by default those of the run.

        Raises:
          UserError: the run cannot be read, or `languages` have another form.
        """
        data = run.config.data
        given = (languages or f"{data.source_language}-{data.target_language}").split("-")
        if len(given) != 2 or not all(given):
            raise UserError(f"--languages {languages}: write source and target, such as en-de")
        self.source, self.target = given
        self.name = run.folder.resolve().name
        self.created = int(run.folder.stat().st_mtime)
        self.translator = run.translator(checkpoint)
        decode = self.translator.decode
        most = decode.mbr_samples or (decode.n_best if decode.sampling else decode.beam_size)
        self.most_translations = most
        """How many different translations of a text a search can find."""
        self.queue: asyncio.Queue[Job] = asyncio.Queue()

    async def translate(
        self, texts: Sequence[str], count: int, gone: "asyncio.Task[None]"
    ) -> list[list[Translation]]:
        """Returns `count` translations of each text, fewer if there are not so many.

        The lines of a text are translated by themselves, as by `flaxformer-mt translate`.

        Raises:
          ConnectionError: `gone` ended first; a batch that is not begun is made without the texts.
        """
        # A search for another number of translations is another program, to be compiled.
        found_count = 1 if count == 1 else self.most_translations
        lines_of = [re.split("\r?\n", text) for text in texts]
        done = asyncio.get_running_loop().create_future()
        self.queue.put_nowait(Job([*itertools.chain(*lines_of)], found_count, done))
        try:
            await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ConnectionError("the client has gone")
            found = iter(done.result())
        finally:
            done.cancel()
        return [joined(list(itertools.islice(found, len(lines))))[:count] for lines in lines_of]

    async def work(self, thread: ThreadPoolExecutor) -> None:
        """Translates what is in the queue, forever."""
        loop = asyncio.get_running_loop()
        while True:
            jobs = [await self.queue.get()]
            while not self.queue.empty() and sum(job.characters for job in jobs) < BATCH_CHARACTERS:
                jobs.append(self.queue.get_nowait())
            jobs = [job for job in jobs if not job.done.done()]
            results = await loop.run_in_executor(thread, self._translate_jobs, jobs)
            for job, result in zip(jobs, results, strict=True):
                if job.done.done():
                    continue
                if isinstance(result, Exception):
                    job.done.set_exception(result)
                else:
                    job.done.set_result(result)

    def _translate_jobs(self, jobs: Sequence[Job]) -> list[list[list[Translation]] | Exception]:
        """Returns the translations of each job's lines, or why there are none."""
        results: dict[int, list[list[Translation]] | Exception] = {}
        for count in {job.num_translations for job in jobs}:
            indices = [index for index, job in enumerate(jobs) if job.num_translations == count]
            lines = [line for index in indices for line in jobs[index].lines]
            try:
                found = iter(self._translate_lines(lines, count))
                for index in indices:
                    results[index] = list(itertools.islice(found, len(jobs[index].lines)))
            except Exception as error:
                if len(jobs) == 1:
                    return [error]
                # The others of the batch are not to blame.
                for index in indices:
                    (results[index],) = self._translate_jobs([jobs[index]])
        return [results[index] for index in range(len(jobs))]

    def _translate_lines(self, lines: Sequence[str], count: int) -> list[list[Translation]]:
        found = self.translator.translate_n_best(lines, count, scores=count > 1)
        return [[Translation(each.text, len(each.tokens)) for each in n_best] for n_best in found]

    def count_source_tokens(self, texts: Iterable[str]) -> int:
        """Returns the number of tokens of texts, without end tokens."""
        return sum(map(len, self.translator.tokenizers.source.encode(list(texts))))


def joined(lines: Sequence[Sequence[Translation]]) -> list[Translation]:
    """Joins the best translations of a text's lines, the second best ones, and so on."""
    ranks = range(max(map(len, lines)))
    texts = [[n_best[min(rank, len(n_best) - 1)] for n_best in lines] for rank in ranks]
    return [
        Translation("\n".join(line.text for line in text), sum(line.num_tokens for line in text))
        for text in texts
    ]
