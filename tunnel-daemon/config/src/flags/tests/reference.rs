//! The page of all flags.

use clap::{Arg, ArgAction, Command, CommandFactory as _};

use crate::flags::kubectl::PluginCli;
use crate::flags::{Cli, compat};
use crate::generated_page::{cell, is_current};

const INTRODUCTION: &str = "\
# Flags

Durations are written `25s`, `5m`, `1h30m`; sizes `4MiB`. A flag that may be repeated says so. This page is written by `cargo xtask docs`
from what `--help` says.
";

const COMPAT: &str = "
## Compat mode

`proxy-server`, `proxy-agent` and `--compat` take upstream's flags. These settings of Adit have an effect there too, from `ADIT_` variables
or from a file: the one that `ADIT_CONFIG` names, else `/etc/adit/server.toml` or `/etc/adit/agent.toml` if it exists. Without them the
programs behave as upstream's. What upstream has a flag for is taken from the command line. Other flags have no effect there: a warning names them, and a restriction is
an error.
";

/// The help text without its trailing default, and that default.
fn meaning(arg: &Arg) -> (String, Option<String>) {
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let text = help.map(ToString::to_string).unwrap_or_default();
    match text.rsplit_once(" [default: ") {
        Some((text, default)) => (
            text.to_owned(),
            default.strip_suffix(']').map(str::to_owned),
        ),
        None => (text, None),
    }
}

fn default(arg: &Arg, told: Option<String>) -> String {
    let values = arg
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy());
    let values: Vec<_> = values.filter(|value| !value.is_empty()).collect();
    match (told, arg.is_required_set(), arg.get_action()) {
        (Some(told), ..) => cell(&told),
        (None, true, _) => "required".to_owned(),
        (None, false, ArgAction::SetTrue) => "off".to_owned(),
        _ if values.is_empty() => "none".to_owned(),
        _ => format!("`{}`", values.join(",")),
    }
}

/// The row of a flag or of a positional argument.
fn row(arg: &Arg) -> String {
    let value = match arg.get_value_names() {
        Some([name, ..]) if arg.get_action().takes_values() => name.as_str(),
        _ => "",
    };
    let spelling = match arg.get_long() {
        Some(long) => format!("--{long} {value}"),
        None => value.to_owned(),
    };
    let spelling = spelling.trim_end();
    let (text, told) = meaning(arg);
    let also = arg.get_visible_aliases().unwrap_or_default();
    let also: String = also
        .iter()
        .map(|name| format!("; also `--{name}`"))
        .collect();
    let default = default(arg, told);
    format!("| `{spelling}` | {default} | {}{also} |\n", cell(&text))
}

/// The section of a command and its subcommands, under its full name.
fn section(name: &str, command: &Command) -> String {
    let about = command.get_about().map(ToString::to_string);
    let mut text = format!("\n## {name}\n\n{}.\n", about.unwrap_or_default());
    let mut groups: Vec<(&str, String)> = Vec::new();
    for arg in command.get_arguments().filter(|arg| arg.get_id() != "help") {
        let row = row(arg);
        let heading = arg.get_help_heading().unwrap_or_default();
        match groups.iter_mut().find(|(known, _rows)| *known == heading) {
            Some((_known, rows)) => rows.push_str(&row),
            None => groups.push((heading, row)),
        }
    }
    for (heading, rows) in groups {
        if !heading.is_empty() {
            text.push_str(&format!("\n### {} ({heading})\n", command.get_name()));
        }
        text.push_str("\n| flag | default | meaning |\n| --- | --- | --- |\n");
        text.push_str(&rows);
    }
    for below in command.get_subcommands() {
        text.push_str(&section(&format!("{name} {}", below.get_name()), below));
    }
    text
}

/// The settings that have an effect in compat mode.
fn settings_of_compat_mode() -> String {
    let mut text = COMPAT.to_owned();
    for (command, _own) in compat::commands() {
        let args = command.get_arguments();
        let mut names: Vec<String> = args
            .filter(|arg| arg.get_id() != "help")
            .filter_map(|arg| Some(format!("`{}`", arg.get_long()?)))
            .collect();
        names.sort();
        let rows: Vec<String> = names.chunks(6).map(|row| row.join(", ")).collect();
        let (name, rows) = (command.get_name(), rows.join(",\n"));
        text.push_str(&format!("\nOf `adit {name} --compat`:\n{rows}.\n"));
    }
    text
}

#[test]
fn page_of_flags_is_current() {
    let mut text = INTRODUCTION.to_owned();
    for command in Cli::command().get_subcommands() {
        if !command.is_hide_set() {
            text.push_str(&section(&format!("adit {}", command.get_name()), command));
        }
    }
    for command in PluginCli::command().get_subcommands() {
        let name = format!("kubectl adit {}", command.get_name());
        text.push_str(&section(&name, command));
    }
    text.push_str(&settings_of_compat_mode());
    is_current("flags.md", &text);
}
