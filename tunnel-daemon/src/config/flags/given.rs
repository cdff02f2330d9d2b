//! Flags from a file and from the environment, put before those of the command line, which win.

use std::fs;

use clap::{Arg, ArgAction, Command};
use toml::{Table, Value};

use crate::config::error::ConfigError;

/// Names the file.
const CONFIG: &str = "config";
/// Begins the name of a flag's variable.
const PREFIX: &str = "ADIT_";

/// The arguments of a command that takes `--config`, completed: by the environment first, then by the file, each with what
/// was not said before it. `args` begins with the command's name.
///
/// # Errors
/// The file cannot be read, is no TOML, or names a flag that the command does not have; a value that cannot be one.
pub(super) fn complete(
    cli: &Command,
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<String>, ConfigError> {
    let Some((name, own)) = args.split_first() else {
        return Ok(Vec::new());
    };
    let Some(command) = cli
        .find_subcommand(name)
        .filter(|command| flag(command, CONFIG).is_some())
    else {
        return Ok(args.to_vec());
    };
    let mut said = own.to_vec();
    let mut more = Vec::new();
    for arg in command.get_arguments() {
        let Some(long) = arg.get_long() else { continue };
        let variable = format!("{PREFIX}{}", long.replace('-', "_").to_uppercase());
        if let Some(text) = env(&variable)
            && !is_said(arg, &said)
        {
            more.extend(
                from_text(arg, &text)
                    .map_err(|why| ConfigError::new(format!("{variable}: {why}")))?,
            );
        }
    }
    said.splice(0..0, more);
    if let Some(path) = path(&said) {
        let wrong = |why: String| ConfigError::new(format!("--config {path}: {why}"));
        let text = fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
        let table: Table = toml::from_str(&text).map_err(|error| wrong(one_line(&error)))?;
        let mut more = Vec::new();
        for (key, value) in &table {
            let arg = flag(command, key).filter(|_| key != CONFIG);
            let arg = arg.ok_or_else(|| {
                wrong(format!(
                    "adit {name} has no flag --{key}; --help lists the flags"
                ))
            })?;
            if !is_said(arg, &said) {
                more.extend(from_value(arg, value).map_err(|why| wrong(format!("{key}: {why}")))?);
            }
        }
        said.splice(0..0, more);
    }
    said.insert(0, name.clone());
    Ok(said)
}

fn one_line(error: &toml::de::Error) -> String {
    let lines: Vec<&str> = error.message().split_whitespace().collect();
    lines.join(" ")
}

fn flag<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let mut args = command.get_arguments();
    args.find(|arg| arg.get_long() == Some(name))
}

/// Whether the arguments have this flag, by any of its names.
fn is_said(arg: &Arg, args: &[String]) -> bool {
    let mut names = arg.get_visible_aliases().unwrap_or_default();
    names.extend(arg.get_long());
    let flags = args.iter().take_while(|arg| *arg != "--");
    let mut named = flags.filter_map(|arg| arg.strip_prefix("--"));
    named.any(|flag| names.contains(&flag.split('=').next().unwrap_or_default()))
}

/// Where the file is, if there is one.
fn path(args: &[String]) -> Option<String> {
    let at = args.iter().position(|arg| *arg == format!("--{CONFIG}"));
    let behind = at.and_then(|at| args.get(at + 1)).map(String::as_str);
    let joined = args.iter().find_map(|arg| arg.strip_prefix("--config="));
    joined.or(behind).map(str::to_owned)
}

/// A variable's text: of a flag that may be repeated, a value for each line.
fn from_text(arg: &Arg, text: &str) -> Result<Vec<String>, String> {
    match (arg.get_action(), text) {
        (ArgAction::SetTrue, "true" | "1") => switch(arg, true),
        (ArgAction::SetTrue, "false" | "0" | "") => switch(arg, false),
        (ArgAction::SetTrue, _) => Err("write true or false".to_owned()),
        (ArgAction::Append, _) => Ok(text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| assigned(arg, line))
            .collect()),
        _ => Ok(vec![assigned(arg, text)]),
    }
}

fn from_value(arg: &Arg, value: &Value) -> Result<Vec<String>, String> {
    let takes_many = matches!(arg.get_action(), ArgAction::Append);
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(is_on)) => switch(arg, *is_on),
        (ArgAction::SetTrue, _) => Err("write true or false".to_owned()),
        (_, Value::Array(values)) if takes_many => values
            .iter()
            .map(|value| Ok(assigned(arg, &plain(value)?)))
            .collect(),
        (_, value) => Ok(vec![assigned(arg, &plain(value)?)]),
    }
}

fn switch(arg: &Arg, is_on: bool) -> Result<Vec<String>, String> {
    let long = arg.get_long().filter(|_| is_on);
    Ok(long.map(|long| format!("--{long}")).into_iter().collect())
}

fn assigned(arg: &Arg, value: &str) -> String {
    format!("--{}={value}", arg.get_long().unwrap_or_default())
}

fn plain(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Boolean(is_on) => Ok(is_on.to_string()),
        _ => Err("write a text, a number, true or false, or a list of these where the flag may be repeated".to_owned()),
    }
}
