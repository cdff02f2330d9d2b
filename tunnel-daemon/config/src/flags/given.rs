//! Flags from the environment and from a file, merged with those of the command line, which win. An empty list or permission is
//! an error: taken for none at all, it would permit everything.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::path::Path;

use adit_core::text::Excerpt;
use clap::{Arg, ArgAction, Command};
use toml::{Table, Value};

use crate::error::ConfigError;
use crate::limits;
use crate::nearest::nearest;

/// The flag that names the file.
const CONFIG: &str = "config";
/// Prefix of the environment variables for flags.
const PREFIX: &str = "ADIT_";
/// Flags that, besides lists, restrict something when they are given: an empty value is no value, and no absence either.
pub(super) const RESTRICTIONS: &[&str] = &[
    "agent-crl",
    "agent-deny",
    "agent-proof",
    "cluster-ca-cert",
    "frontend-users",
    "peer-ca-cert",
    "peer-crl",
    "peer-group",
    "proxy-strategies",
    "redirect-on-failure",
    "server-ca-cert",
    "tls-min-version",
];
/// Prefixes of the values that Kubernetes puts into `..._PORT` for each Service of a pod's namespace.
const SERVICE_LINKS: &[&str] = &["tcp://", "udp://", "sctp://"];
/// Flags whose value is a URL that may have a password.
const URLS: &[&str] = &["https-proxy", "target-proxy"];
/// Protocols in the names of such variables.
const PROTOCOLS: &[&str] = &["TCP", "UDP", "SCTP"];
/// The variable of the file in compat mode, whose command line does not name one.
const FILE: &str = "ADIT_CONFIG";
/// Why a flag of upstream has no effect in compat mode.
const COMPAT: &str = "has no effect: compat mode takes this flag from the command line alone";
/// What is said of a flag that compat mode lacks.
const LACKING: &str = "has no effect in compat mode";
/// The variable of log filters, which is no flag.
const FILTER: &str = "ADIT_LOG";
/// Unknown variables that are named; others are counted.
const NAMED_MAX: usize = 16;

/// A complete command line.
pub(super) struct Given {
    /// Begins with the command's name.
    pub(super) args: Vec<String>,
    /// By flag name: the origin of each flag that is not from the command line.
    origins: BTreeMap<String, String>,
}

impl Given {
    /// A command line of upstream's, to which settings are added; `command` is Adit's name of the program.
    pub(super) fn of_line(command: &str, args: &[String]) -> Self {
        let command = std::iter::once(command.to_owned());
        Self {
            args: command.chain(args.iter().cloned()).collect(),
            origins: BTreeMap::new(),
        }
    }

    /// The arguments that were typed, the last `typed`, and those that were added in front of them.
    pub(super) fn parts(&self, typed: usize) -> (&[String], &[String]) {
        let all = self.args.get(1..).unwrap_or_default();
        let (added, typed) = all.split_at(all.len().saturating_sub(typed));
        (typed, added)
    }

    /// Whether errors must be JSON because the file or the environment asks for it.
    pub(super) fn asks_json(&self) -> bool {
        self.args.iter().any(|arg| arg == "--log-format=json")
    }

    /// Origin of the first flag that `why` names and that is not from the command line. Tips are skipped: they name flags that
    /// were not given.
    pub(super) fn origin(&self, why: &str) -> Option<&str> {
        let fault = why.split("; tip: ").next().unwrap_or_default();
        let mut words = fault.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        let origin = |word: &str| self.origins.get(word.strip_prefix("--")?);
        words.find_map(origin).map(String::as_str)
    }

    /// Adds a flag that no stronger source has set.
    fn take(&mut self, arg: &Arg, origin: String, values: Vec<String>) {
        let long = arg.get_long().unwrap_or_default().to_owned();
        self.origins.insert(long, origin);
        self.args.splice(1..1, values);
    }

    /// Whether this flag is set, by any of its names.
    fn has(&self, arg: &Arg) -> bool {
        let names = names(arg);
        let dashed = before_dashes(&self.args).filter(|arg| arg.starts_with('-'));
        // Upstream's programs take one dash, too.
        let mut said = dashed.map(|arg| arg.trim_start_matches('-'));
        names.iter().any(|name| self.origins.contains_key(*name))
            || said.any(|flag| names.contains(&flag.split('=').next().unwrap_or_default()))
    }

    pub(super) fn add_environment(
        &mut self,
        command: &Command,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(), ConfigError> {
        for arg in command.get_arguments() {
            for name in names(arg) {
                let variable = variable(name);
                let Some(text) = env(&variable).filter(|text| !is_service_link(&variable, text))
                else {
                    continue;
                };
                let is_unset = text.is_empty() && !must_have_value(arg);
                if !self.has(arg) && !is_unset {
                    let values = from_text(arg, &text);
                    let wrong = |why| ConfigError::new(format!("{variable}: {why}"));
                    self.take(arg, variable.clone(), values.map_err(wrong)?);
                }
            }
        }
        Ok(())
    }

    fn add_file(&mut self, command: &Command, path: &str) -> Result<(), ConfigError> {
        self.add_known(command, command, path).map(|_none| ())
    }

    /// Adds the settings of a file in compat mode, which may be that of a `native` command, too.
    pub(super) fn add_compat_file(
        &mut self,
        command: &Command,
        native: &Command,
        upstream: &[&str],
        path: &str,
        warnings: &mut Vec<String>,
    ) -> Result<(), ConfigError> {
        let without_effect = self.add_known(command, native, path)?;
        let (upstreams, others): (Vec<String>, Vec<String>) = without_effect
            .into_iter()
            .partition(|key| upstream.contains(&key.as_str()));
        if let Some(key) = others.iter().find(|key| is_restriction(native, key)) {
            return Err(lacks_restriction(&format!("--config {path}: {key}")));
        }
        for (keys, why) in [(upstreams, COMPAT), (others, LACKING)] {
            if !keys.is_empty() {
                warnings.push(format!("--config {path}: {}: {why}", keys.join(", ")));
            }
        }
        Ok(())
    }

    /// Adds the file's flags of `command`, and returns its other flags of `native`.
    fn add_known(
        &mut self,
        command: &Command,
        native: &Command,
        path: &str,
    ) -> Result<Vec<String>, ConfigError> {
        let wrong = |why: String| ConfigError::new(format!("--config {path}: {why}"));
        let text = read(path).map_err(wrong)?;
        let table: Table = toml::from_str(&text).map_err(|error| wrong(told(&error, &text)))?;
        let mut taken = BTreeSet::new();
        let mut without_effect = Vec::new();
        for (key, value) in &table {
            if key == CONFIG {
                return Err(wrong(format!("{key}: a file names no other file")));
            }
            let Some(arg) = find(command, key) else {
                if find(native, key).is_some() {
                    without_effect.push(key.clone());
                    continue;
                }
                let name = native.get_name();
                return Err(wrong(format!(
                    "adit {name} has no flag --{key}; --help lists the flags"
                )));
            };
            if !taken.insert(arg.get_id()) {
                return Err(wrong(format!(
                    "{key}: the file has this flag by another name, too"
                )));
            }
            let values = from_value(arg, value).map_err(|why| wrong(format!("{key}: {why}")))?;
            if !self.has(arg) {
                self.take(arg, format!("--config {path}: {key}"), values);
            }
        }
        Ok(without_effect)
    }
}

/// Whether the flag, by any of its names, restricts something.
fn is_restriction(command: &Command, name: &str) -> bool {
    let long = find(command, name).and_then(Arg::get_long);
    long.is_some_and(|long| RESTRICTIONS.contains(&long))
}

/// A restriction is never taken without effect.
fn lacks_restriction(what: &str) -> ConfigError {
    ConfigError::new(format!(
        "{what}: compat mode has no such restriction: leave it out, or start adit with its own flags"
    ))
}

/// The flag with this name.
fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let mut args = command.get_arguments();
    args.find(|arg| names(arg).contains(&name))
}

/// Refuses passwords on the command line, which everyone on the host can read.
fn check_urls(args: &[String]) -> Result<(), ConfigError> {
    let mut flag = None;
    for arg in before_dashes(args) {
        let (name, value) = match (flag.take(), arg.strip_prefix("--")) {
            (Some(name), _) => (name, Some(arg)),
            (None, Some(rest)) => match rest.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (rest, None),
            },
            (None, None) => continue,
        };
        let is_url = URLS.contains(&name);
        if is_url && value.is_some_and(|value| value.contains('@')) {
            return Err(ConfigError::new(format!(
                "--{name}: everyone on this host can read a command line: give a URL with a password by {}, or in the file of --config",
                variable(name)
            )));
        }
        flag = (is_url && value.is_none()).then_some(name);
    }
    Ok(())
}

/// Completes the arguments of a command that takes `--config`: first from the environment, then from the file, each with flags
/// that are not set yet. `args` begins with the command's name. A request for help works whatever the file contains.
///
/// # Errors
/// The file cannot be read, is not TOML, or names a flag that the command does not have; or a value is invalid.
pub(super) fn complete(
    cli: &Command,
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Given, ConfigError> {
    check_urls(args)?;
    let mut given = Given {
        args: args.to_vec(),
        origins: BTreeMap::new(),
    };
    let command = args.first().and_then(|name| cli.find_subcommand(name));
    let takes_file = |command: &&Command| {
        let mut args = command.get_arguments();
        args.any(|arg| arg.get_long() == Some(CONFIG))
    };
    let asks_help = before_dashes(args).any(|arg| arg == "-h" || arg == "--help");
    if let Some(command) = command.filter(takes_file).filter(|_| !asks_help) {
        given.add_environment(command, env)?;
        if let Some(path) = path(&given.args) {
            given.add_file(command, &path)?;
        }
    }
    Ok(given)
}

fn before_dashes(args: &[String]) -> impl Iterator<Item = &str> {
    args.iter()
        .map(String::as_str)
        .take_while(|arg| *arg != "--")
}

fn names(arg: &Arg) -> Vec<&str> {
    let mut names: Vec<&str> = arg.get_long().into_iter().collect();
    names.extend(arg.get_visible_aliases().unwrap_or_default());
    names
}

/// Whether an empty value of the flag is an error.
pub(super) fn must_have_value(arg: &Arg) -> bool {
    let restricts = || {
        arg.get_long()
            .is_some_and(|long| RESTRICTIONS.contains(&long))
    };
    matches!(arg.get_action(), ArgAction::Append) || restricts()
}

/// Why an empty value is refused, and what to write.
fn empty(arg: &Arg) -> String {
    let words = match arg.get_long() {
        Some("allow-target" | "client-allow-target" | "agent-grant") => ", all or none",
        Some("allowed-destination") => " or none",
        _ => "",
    };
    format!("it is empty; write a value{words}, or leave it out")
}

/// Warnings about `ADIT_` variables that have no effect on this command; `names` are all variables of the process. Values are
/// not told: they may be secrets.
pub(super) fn warn_unknown(
    command: &Command,
    names: &[String],
    env: &dyn Fn(&str) -> Option<String>,
    warnings: &mut Vec<String>,
) {
    let flags: Vec<&str> = command.get_arguments().flat_map(self::names).collect();
    let why = |name: &str| {
        let near = near(name, &flags);
        let near = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
        let command = command.get_name();
        format!("has no effect: adit {command} has no such flag{near}")
    };
    let is_unknown = |name: &str| flags.iter().all(|flag| variable(flag) != name);
    warn_about(names, env, is_unknown, why, warnings);
}

/// Warnings about `ADIT_` variables that have no effect in compat mode; `known` has the settings that have one, and `upstream` the
/// flags of its command line.
///
/// # Errors
/// The variable of a restriction that compat mode lacks.
pub(super) fn warn_compat(
    known: &Command,
    native: &Command,
    upstream: &[&str],
    variables: &[String],
    env: &dyn Fn(&str) -> Option<String>,
    warnings: &mut Vec<String>,
) -> Result<(), ConfigError> {
    let flags: Vec<&str> = known.get_arguments().flat_map(names).collect();
    let native_flag = |name: &str| {
        let mut args = native.get_arguments().flat_map(names);
        args.find(|flag| variable(flag) == name)
    };
    let is_unknown = |name: &str| name != FILE && flags.iter().all(|flag| variable(flag) != name);
    let is_lacking = |name: &&String| {
        let flag = native_flag(name).filter(|flag| !upstream.contains(flag));
        is_unknown(name) && flag.is_some_and(|flag| is_restriction(native, flag))
    };
    if let Some(name) = variables.iter().find(is_lacking) {
        return Err(lacks_restriction(name));
    }
    let command = known.get_name();
    let why = |name: &str| match (native_flag(name), near(name, &flags)) {
        (Some(flag), _) if upstream.contains(&flag) => COMPAT.to_owned(),
        (Some(_), _) => LACKING.to_owned(),
        (None, Some(near)) => {
            format!("has no effect: adit {command} has no such flag; did you mean {near}?")
        }
        (None, None) => format!("has no effect: adit {command} has no such flag"),
    };
    warn_about(variables, env, is_unknown, why, warnings);
    Ok(())
}

/// The variable whose name is nearest.
fn near(name: &str, flags: &[&str]) -> Option<String> {
    let typed = name.strip_prefix(PREFIX).unwrap_or_default();
    nearest(typed, flags.iter().copied()).map(variable)
}

fn warn_about(
    names: &[String],
    env: &dyn Fn(&str) -> Option<String>,
    is_unknown: impl Fn(&str) -> bool,
    why: impl Fn(&str) -> String,
    warnings: &mut Vec<String>,
) {
    let unknown = names.iter().filter(|name| {
        let is_ours = name.starts_with(PREFIX) && name.as_str() != FILTER && is_unknown(name);
        is_ours && !is_service_link(name, &env(name).unwrap_or_default())
    });
    let unknown: Vec<&String> = unknown.collect();
    let told = unknown.iter().take(NAMED_MAX);
    warnings.extend(told.map(|name| format!("{} {}", Excerpt(name), why(name))));
    if let Some(more) = unknown
        .len()
        .checked_sub(NAMED_MAX)
        .filter(|more| *more > 0)
    {
        warnings.push(format!("{more} further {PREFIX} variables have no effect"));
    }
}

fn variable(flag: &str) -> String {
    format!("{PREFIX}{}", flag.replace('-', "_").to_uppercase())
}

/// Whether Kubernetes sets the variable: for a Service `adit-x` it makes `ADIT_X_SERVICE_HOST`, `ADIT_X_SERVICE_PORT`,
/// `ADIT_X_SERVICE_PORT_NAME`, `ADIT_X_PORT=tcp://...` and `ADIT_X_PORT_8091_TCP` with `_ADDR`, `_PORT`, `_PROTO`.
fn is_service_link(name: &str, text: &str) -> bool {
    let of_port = || {
        let (_, behind) = name.rsplit_once("_PORT_")?;
        let (number, protocol) = behind.split_once('_')?;
        let protocol = protocol.split('_').next()?;
        let is_link = number.parse::<u16>().is_ok() && PROTOCOLS.contains(&protocol);
        is_link.then_some(())
    };
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || (name.ends_with("_PORT") && SERVICE_LINKS.iter().any(|link| text.starts_with(link)))
        || of_port().is_some()
}

/// Path of the file, if one is given.
fn path(args: &[String]) -> Option<String> {
    let mut args = before_dashes(args);
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args
                .next()
                .filter(|path| !path.starts_with('-'))
                .map(str::to_owned);
        }
        if let Some(path) = arg.strip_prefix("--config=") {
            return Some(path.to_owned());
        }
    }
    None
}

fn read(path: &str) -> Result<String, String> {
    let most = limits::CONFIG_FILE_BYTES_MAX;
    let path = path.to_owned();
    // No signal handler stands yet, so that a process with id 1 could not be ended while it waits.
    let read = adit_host::files::within(adit_host::files::STUCK_AFTER, move || {
        std::io::read_to_string(adit_host::files::open(Path::new(&path))?.take(most + 1))
    });
    let text = read.flatten().map_err(|error| error.to_string())?;
    if text.len() as u64 > most {
        return Err(format!("longer than {most} bytes"));
    }
    Ok(text)
}

fn told(error: &toml::de::Error, text: &str) -> String {
    let words: Vec<&str> = error.message().split_whitespace().collect();
    let before = error.span().and_then(|span| text.get(..span.start));
    let line = before.map_or(1, |before| before.matches('\n').count() + 1);
    format!("line {line}: {}", words.join(" "))
}

/// A variable's text as values; for a repeatable flag, each line is one value.
fn from_text(arg: &Arg, text: &str) -> Result<Vec<String>, String> {
    let is_bool = arg
        .get_possible_values()
        .iter()
        .any(|value| value.get_name() == "true");
    match (arg.get_action(), text) {
        (ArgAction::SetTrue, "true" | "1") => Ok(switch(arg, true)),
        (ArgAction::SetTrue, "false" | "0") => Ok(switch(arg, false)),
        (ArgAction::SetTrue, _) => Err("write true or false".to_owned()),
        _ if text.trim().is_empty() && must_have_value(arg) => Err(empty(arg)),
        (ArgAction::Append, _) => {
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            Ok(lines.map(|line| assigned(arg, line)).collect())
        }
        (_, "1") if is_bool => Ok(vec![assigned(arg, "true")]),
        (_, "0") if is_bool => Ok(vec![assigned(arg, "false")]),
        _ => Ok(vec![assigned(arg, text)]),
    }
}

fn from_value(arg: &Arg, value: &Value) -> Result<Vec<String>, String> {
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(is_on)) => Ok(switch(arg, *is_on)),
        (ArgAction::SetTrue, _) => Err("write true or false".to_owned()),
        (ArgAction::Append, Value::Array(values)) if values.is_empty() => Err(empty(arg)),
        (_, Value::String(text)) if text.trim().is_empty() && must_have_value(arg) => {
            Err(empty(arg))
        }
        (ArgAction::Append, Value::Array(values)) => values
            .iter()
            .map(|value| Ok(assigned(arg, &plain(value)?)))
            .collect(),
        (_, value) => Ok(vec![assigned(arg, &plain(value)?)]),
    }
}

fn switch(arg: &Arg, is_on: bool) -> Vec<String> {
    let long = arg.get_long().filter(|_| is_on);
    long.map(|long| format!("--{long}")).into_iter().collect()
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
