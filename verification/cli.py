"""The `blink` command [design 10]. What loads slowly or belongs to other packages is imported when it is used."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from verification.failures.known_issues import KnownIssue

_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
EXIT_INVALID = 1
EXIT_UNUSABLE = 2

# Command -> (module, attribute, its help line): loaded when the command is run, so that `blink --help` is fast.
_LAZY: dict[str, tuple[str, str, str]] = {
    "model": ("blink_core.model_store.cli", "model_app", "Models: fetch a pinned one, or look at one."),
    "rig": ("hil_rigs.cli", "rig_app", "Rigs: what is described, and what is there on this machine."),
    "explore": ("verification.explore.cli", "explore_app", "Small scopes, exhaustively, on the compiled scheduler."),
    "trace": ("verification.trace.cli", "trace_app", "Recorded event logs: record, check, replay, convert."),
    "mutants": ("verification.mutants.cli", "app", "Seeded faults, and which checkers notice them."),
    "scenarios": ("verification.scenarios.cli", "scenarios", "Faults of the corpus: tests of each, or why not."),
    "serve": ("hil_rigs.serve", "serve", "Serve a model with an OpenAI-style API on a rig."),
}


app = typer.Typer(
    help="Blink: serves large language models without the host CPU, and certifies that it does so correctly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
certificate_app = typer.Typer(help="Signed reports and certificates.", no_args_is_help=True)
app.add_typer(certificate_app, name="certificate")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
ReportPath = Annotated[Path, typer.Argument(metavar="FILE", help="A run's output folder, or any file in it.")]


KnownIssues = Annotated[
    Path | None, typer.Option("--known-issues", help="Known issues (YAML) instead of Blink's own; they excuse nothing.")
]


def _version(wanted: bool) -> None:
    if wanted:
        from verification.certificate.provenance import tool_version

        typer.echo(f"blink {tool_version()}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _fail(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(EXIT_UNUSABLE)


@app.command("certify")
def certify_command(
    model: Annotated[str, typer.Option("--model", help="A pinned name, a .gguf file, or a folder.")] = _DEFAULT_MODEL,
    rig: Annotated[str | None, typer.Option("--rig", help="The rig to run on (default local).")] = None,
    rig_file: Annotated[
        Path | None, typer.Option("--rig-file", help="Description of a rig of your own; see `blink rig init`.")
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", help="smoke, nightly or full, as far as the rig has it.")
    ] = "smoke",
    out: Annotated[Path, typer.Option("--out", help="Folder for the report.")] = Path("out/certify"),
    seed: Annotated[str | None, typer.Option("--seed", help="Root seed: a number, or 'random'.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Private key (PEM, ed25519) that signs.")] = None,
    deadline: Annotated[float | None, typer.Option("--deadline", min=1.0, help="Limit of the whole run, s.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="End at the first failure.")] = False,
    known_issues: KnownIssues = None,
    bundle_prompts: Annotated[
        bool, typer.Option("--bundle-prompts", help="Keep prompts and tokens in the bundles of failures.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Run the I-th of N parts; goes on where it was interrupted."),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--shards", metavar="N", min=1, help="Run N parts side by side, then join them.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="With --shards: so many at once (default: one a two cores).")
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", help="Failures that nightly and full run first (default: beside the models)."),
    ] = None,
    agree_with: Annotated[
        Path | None, typer.Option("--agree-with", help="Another run's output folder, to compare answers with.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the suite on a rig. Exit 0 passed, 1 a property failed, 2 could not run."""
    from verification.certificate.certify import certify
    from verification.certificate.fleet import follow_parent
    from verification.certificate.side_by_side import certify_shards

    follow_parent()
    if rig is not None and rig_file is not None:
        raise _fail(f"--rig {rig} and --rig-file {rig_file}: name one rig")
    if rig_file is not None and rig_file.suffix not in (".yaml", ".yml"):
        raise _fail(f"--rig-file {rig_file}: the file of a rig ends in .yaml or .yml")
    chosen = str(rig_file.resolve()) if rig_file is not None else rig or "local"
    more = ("--exitfirst",) * fail_fast + ("--blink-bundle-prompts",) * bundle_prompts
    if known_issues is not None:
        _load_issues(known_issues)
        more += ("--blink-known-issues", str(known_issues.resolve()))
    if count is not None:
        if shard is not None or agree_with is not None:
            raise _fail("--shards runs all parts; --shard and --agree-with are of one run")
        words = ["--rig", chosen, "--model", model, "--profile", profile]
        given = {
            "--seed": seed,
            "--key": key,
            "--deadline": deadline,
            "--known-issues": known_issues,
            "--corpus": corpus,
        }
        words += [word for name, value in given.items() if value is not None for word in (name, str(value))]
        words += ["--fail-fast"] * fail_fast + ["--bundle-prompts"] * bundle_prompts
        whole = certify_shards(words, chosen, profile, out.resolve(), seed, count, jobs, key=key, as_json=as_json)
        raise typer.Exit(whole)
    if jobs is not None:
        raise _fail(f"--jobs {jobs} is of --shards")
    code = certify(
        chosen,
        model,
        profile,
        out,
        seed,
        key=key,
        deadline_s=deadline,
        as_json=as_json,
        pytest_arguments=more,
        shard=shard,
        corpus=corpus,
        agree_with=agree_with,
    )
    raise typer.Exit(code)


def _load_issues(path: Path | None) -> tuple[KnownIssue, ...]:
    from verification.failures.known_issues import DEFAULT_PATH, KnownIssuesError, load

    try:
        return load(path or DEFAULT_PATH)
    except KnownIssuesError as error:
        raise _fail(str(error)) from error


@app.command("triage")
def triage_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Output folders, or any folders above them.")],
    known_issues: KnownIssues = None,
    as_json: JsonFlag = False,
) -> None:
    """Group the failures of runs by property, clause and signature. Exit 0, or 2 when there is nothing to read."""
    from verification.failures.triage import print_text, triage

    result = triage(folders, _load_issues(known_issues))
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
    else:
        print_text(result, typer.echo)
    if not result.bundles and (result.problems or not all(folder.is_dir() for folder in folders)):
        raise typer.Exit(EXIT_UNUSABLE)


@certificate_app.command("verify")
def verify_command(
    file: ReportPath,
    trust: Annotated[Path | None, typer.Option("--trust", help="PEM public keys: a file or a folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check signature, files, schema and verdict, offline. Exit 0 valid, 1 not, 2 nothing to check."""
    from dataclasses import asdict

    from verification.certificate.keys import KeyFileError, load_trusted
    from verification.certificate.verify import verify

    try:
        result = verify(file, load_trusted(trust) if trust is not None else ())
    except (FileNotFoundError, KeyFileError) as error:
        raise _fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps({**asdict(result), "summary": result.summary}, indent=1))
    else:
        for problem in result.problems:
            typer.echo(f"problem: {problem}")
        for note in result.notes:
            typer.echo(f"note: {note}")
        if result.valid:
            typer.echo(f"signer: {result.key_id}\n{result.kind}: {result.verdict}")
        typer.echo(result.summary)
    raise typer.Exit(0 if result.valid else EXIT_INVALID)


@certificate_app.command("show")
def show_command(file: ReportPath, as_json: JsonFlag = False) -> None:
    """Show a report: claim, properties, limits. Checks its form, not its signature (see verify)."""
    from rich.console import Console

    from verification.certificate.console import summary_table
    from verification.certificate.report import ReportError, known_issue_lines, validate

    path = (file if file.is_dir() else file.parent) / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        validate(report)
    except (OSError, ValueError, ReportError, RecursionError) as error:
        raise _fail(f"{path}: {error}") from error
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    say(f"{report['claim']['text']}\n{report['claim']['standing']}\n{report['claim']['scope']}\n")
    console.print(summary_table(report))
    say(f"run {report['run']['id']}, {report['run']['started']}, seed {report['run']['seed']}")
    say(f"commit {report['source']['git_commit'] or 'unknown'}{' (dirty)' if report['source']['dirty'] else ''}")
    for reason in report["verdict"]["reasons"]:
        say(f"- {reason}")
    for line in [*(f"warning: {text}" for text in report["warnings"])]:
        say(line)
    for entry in report["not_run"]:
        say(f"not run: {entry['id']} ({entry['outcome']}): {entry['reason']}")
    for test in report["tests"]:
        if test["bundle"]:
            say(f"bundle: {test['bundle']}, signature {test['signature']}, replay: {test['replay']}")
    for line in known_issue_lines(report):
        say(line)
    for line in report["not_covered"]:
        say(f"not covered: {line}")
    say(f"verdict: {report['verdict']['word']} (exit {report['verdict']['exit_code']})")


@certificate_app.command("join")
def join_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Output folders of all shards of a run.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the report of the whole run.")],
    key: Annotated[Path | None, typer.Option("--key", help="Private key (PEM, ed25519) that signs.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make one report of a run's shards. Exit 0 passed, 1 a property failed, 2 they do not make one run."""
    from verification.certificate.console import show_result
    from verification.certificate.join import JoinError, join
    from verification.certificate.keys import KeyFileError
    from verification.certificate.output import OutputError

    try:
        built = join(folders, out.resolve(), key, [*sys.argv[:1], "certificate", "join", *map(str, folders)])
    except (JoinError, KeyFileError, OutputError, OSError) as error:
        raise _fail(str(error)) from error
    show_result(built, out.resolve(), as_json)
    raise typer.Exit(int(built["verdict"]["exit_code"]))


@certificate_app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A run's output folder, or any file in it.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another's; it may be of another rig.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare two runs, and their recorded answers. Exit 0 nothing got worse, 1 something did, 2 unreadable.

    Worse are: a test that had another outcome and does not pass now; a new test that failed, could not be decided, or
    is required and did not pass; a required test that is gone; an expected situation that is not reached any more; a
    new error of the session; a verdict that got worse; recorded answers that contradict each other, are damaged, or
    were recorded by the old run alone. Other limits, digests, seeds and machines are told and change nothing.
    """
    from verification.certificate.compare import CompareError, compare, lines

    try:
        result = compare(old, new)
    except CompareError as error:
        raise _fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
    else:
        for line in lines(result):
            typer.echo(line)
    raise typer.Exit(0 if result.ok else EXIT_INVALID)


def mount(first: str | None) -> typer.Typer:
    """The application for a command line whose first word is `first`; no other lazy command is imported."""
    for name, (module, attribute, line) in _LAZY.items():
        if name != first:
            app.command(name, help=line)(_not_loaded)
            continue
        target = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name)
        else:
            app.command(name)(target)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command that was not named on the command line was called")


def main() -> None:
    """Entry point of the `blink` command."""
    mount(next((word for word in sys.argv[1:] if not word.startswith("-")), None))(prog_name="blink")


if __name__ == "__main__":
    main()
