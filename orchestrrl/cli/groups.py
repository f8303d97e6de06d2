"""How `orchestrrl --help` is ordered: its panels, and nouns whose verbs live in several modules."""

import typer

# Panels of `orchestrrl --help`.
SERVICES = "Services"
RUNNING_DAEMON = "Ask and steer a running daemon"


def group(app: typer.Typer, name: str, help_text: str, panel: str | None = None) -> typer.Typer:
    """The command group `name` of the application, made by whoever asks first."""
    for registered in app.registered_groups:
        if registered.name == name and registered.typer_instance is not None:
            return registered.typer_instance
    made = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=help_text)
    app.add_typer(made, name=name, rich_help_panel=panel)
    return made


def fabric_group(app: typer.Typer) -> typer.Typer:
    """`orchestrrl fabric`."""
    return group(
        app, "fabric", "The optical fabric: its site, circuits for a demand, and when they are changed.", RUNNING_DAEMON
    )


def ocs_group(app: typer.Typer) -> typer.Typer:
    """`orchestrrl ocs`."""
    return group(app, "ocs", "Optical circuit switches: what they are and where their light goes.", RUNNING_DAEMON)


def sync_group(app: typer.Typer) -> typer.Typer:
    """`orchestrrl sync`."""
    return group(app, "sync", "How new weights reach every engine.", RUNNING_DAEMON)
