"""`statewise check`: the battery of tests on the components of a plug-in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from statewise.cli.output import print_json, say
from statewise.errors import CheckFailed, RecipeError


def command(
    file: Path = typer.Argument(help="A Python file that defines losses, weights, selectors, sources, tasks ..."),
    as_json: bool = typer.Option(False, "--json", help="Print the checks as JSON."),
) -> None:
    """Run the test battery on a plug-in.

    Every component in FILE is checked; the exit code is 1 where a check fails.
    """
    from statewise.component import load_plugin

    components = load_plugin(str(file))
    if not components:
        raise RecipeError(f'{file}: defines no component; subclass Loss, Weight, ... with kind="name".')
    say(f"checking {', '.join(f'{c.role} {c.kind}' for c in components)}")
    from statewise.testing import battery

    results = {f"{c.role} {c.kind}": battery(c) for c in components}
    if as_json:
        print_json({name: [asdict(check) for check in checks] for name, checks in results.items()})
    else:
        for name, checks in results.items():
            print(name)
            said: set[str] = set()
            for check in checks:
                detail = "as above" if check.detail in said else check.detail
                said.add(check.detail or "-")
                print(f"  {'ok  ' if check.passed else 'FAIL'} {check.name}{f': {detail}' if detail else ''}")
    failed = sum(not check.passed for checks in results.values() for check in checks)
    if failed:
        raise CheckFailed(f"{file}: {failed} of {sum(map(len, results.values()))} checks failed.")
