"""Writes a SLURM job array whose tasks run shards of a recipe, with a report after the last task."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patchlight.bench.local import PREEMPTED
from patchlight.core.errors import PatchlightError

END = "END_OF_REPORT"
WIDE = 90
TIMES = "give hours and minutes as 2h, 90m or 1d12h, or in SLURM's format: 02:00:00, 1-12:00:00"
SPELLED = re.compile(r"(?=.)(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?")
WITH_DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+))?(?::(?P<s>\d+))?")
WITHOUT = re.compile(r"(?:(?P<h>\d+):(?=\d+:))?(?P<m>\d+)(?::(?P<s>\d+))?")
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class Job:
    """The resources of each task of the array; `setup` are shell commands to run first."""

    array: str
    time: str
    cpus: int | None = None
    gpus: int = 0
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    mail: str | None = None
    setup: Sequence[str] = ()


def script(name: str, out: str, run: Sequence[str], report: Sequence[str], job: Job) -> str:
    """The sbatch script: each task runs `run` with `--shard TASK/TASKS`; the first task queues `report`.

    The program is a job step (srun), because SLURM sends its signals before preemption and before the time limit to
    steps. The shell survives and requeues the task. `scancel` ends the shell as well.
    """
    tasks, at_once = _tasks(job.array)
    where = [f"--partition={job.partition}"] * bool(job.partition) + [f"--account={job.account}"] * bool(job.account)
    memory = [f"--mem={_memory(job.mem)}"] if job.mem else []
    log = f"{out.rstrip('/') or '/'}/logs".replace("%", "%%")
    threads = [f"--cpus-per-task={job.cpus}"] if job.cpus else []
    gpus = [f"--gres=gpu:{job.gpus}"] if job.gpus else []
    array = [f"--job-name={name}", f"--array=1-{tasks}{at_once}", f"--time={slurm_time(job.time)}"]
    ends = ["--requeue", "--signal=TERM@60", "--open-mode=append", f"--output={log}/%A_%a.log"]
    mail = [f"--mail-user={job.mail}", "--mail-type=END,FAIL"] if job.mail else []
    after = ["sbatch", f"--job-name={name}-report", "--time=01:00:00", *where, *memory, *mail]
    after += ["--open-mode=append", f"--output={log}/report.log"]
    return render_text(
        "job.sh",
        options=[_escape(option) for option in (*array, *where, *threads, *gpus, *memory, *ends)],
        setup=job.setup,
        ask_for_report=_lines(after, f'--dependency=afterany:"$SLURM_ARRAY_JOB_ID" <<{END!r}'),
        report=shlex.join(report),
        end=END,
        run=_lines(["srun", *threads, *run], f'--shard "$SLURM_ARRAY_TASK_ID/{tasks}"'),
        preempted=PREEMPTED,
    )


def render_text(template: str, **values: Any) -> str:
    """Fill in a text template of the benchmark."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("patchlight.bench")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.get_template(template).render(**values)


def slurm_time(text: str) -> str:
    """Convert 2h, 90m, 1d12h or one of SLURM's formats to [days-]hours:minutes:seconds."""
    for form in (SPELLED, WITH_DAYS, WITHOUT):
        match = form.fullmatch(text.strip().lower())
        if match:
            seconds = sum(int(count) * SECONDS[unit] for unit, count in match.groupdict().items() if count)
            break
    else:
        raise PatchlightError(f"'{text}' is not a valid duration; {TIMES}")
    if not seconds:
        raise PatchlightError(f"'{text}' is zero; {TIMES}")
    days, rest = divmod(seconds, SECONDS["d"])
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _tasks(text: str) -> tuple[int, str]:
    """The number of tasks, and the limit of simultaneous tasks in SLURM's format: 64, or 64%8."""
    match = re.fullmatch(r"([1-9]\d{0,5})(%[1-9]\d{0,5})?", text.strip())
    if match is None:
        raise PatchlightError(
            f"'{text}' is not a valid array; give a number of tasks (64), optionally with a limit at once (64%8)"
        )
    return int(match[1]), match[2] or ""


def _lines(words: Sequence[str], last: str) -> str:
    """A shell command over several lines, broken before options; `last` is not quoted."""
    lines = [""]
    for word in [*map(shlex.quote, words), last]:
        if word.lstrip("'").startswith("--") and len(lines[-1]) + len(word) > WIDE:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGTkmgt]?", text):
        raise PatchlightError(
            f"'{text}' is not a valid amount of memory; give for example 32G, or a number of megabytes"
        )
    return text


def _escape(option: str) -> str:
    """An option of an sbatch script, in which special characters need a backslash (shell quotes do not work)."""
    if not option.isprintable():
        raise PatchlightError(
            f"{option!r} contains a character that is not printable, which sbatch scripts do not allow"
        )
    return re.sub(r"([^\w./=@%:,+-])", r"\\\1", option)
