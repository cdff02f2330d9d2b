//! Decides which command line to parse: Adit's own, or one of upstream's programs.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::command::{Command, Parsed};
use crate::error::ConfigError;
use crate::flags::kubectl::PLUGIN;
use crate::legacy::hypershift::{self, Sidecar};
use crate::plan::Program;
use crate::{flags, legacy};

/// HyperShift's operator, whose place this program can take.
const OPERATOR: &str = "control-plane-operator";
/// What the name of the operator itself ends with then.
const ORIGINAL: &str = ".original";

/// Reads a whole command line, `argv[0]` included. `env` looks up one environment variable. See [`parse_naming`].
///
/// # Errors
/// As [`parse_naming`].
pub fn parse(
    argv: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Parsed, ConfigError> {
    parse_naming(argv, env, &[])
}

/// As [`parse`]; a server or agent warns of those of the `variables` (names of environment variables) that look like its own
/// and have no effect.
///
/// Upstream's flags apply when called as `proxy-server` or `proxy-agent`, as `konnectivity-server` or `konnectivity-agent`
/// (k0s), or as `adit server --compat` / `adit agent --compat`. As `kubectl-adit` it is kubectl's plugin.
///
/// # Errors
/// One line that names the input and the remedy, with the exit code.
pub fn parse_naming(
    argv: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
    variables: &[String],
) -> Result<Parsed, ConfigError> {
    let mut argv = argv.into_iter();
    let program = argv.next().unwrap_or_else(|| OsString::from("adit"));
    let mut args = argv
        .map(text)
        .collect::<Result<Vec<String>, ConfigError>>()?;
    if Path::new(&program).file_name() == Some(OsStr::new(PLUGIN)) {
        return flags::kubectl::parse(&args);
    }
    if let Some(parsed) = sidecar(Path::new(&program), &args, env) {
        return parsed;
    }
    match compat_mode(&program, &mut args) {
        Some(Program::Server) => legacy::server(&args, env, variables),
        Some(Program::Agent) => legacy::agent(&args, env, variables),
        Some(Program::Proxy) | None => flags::parse(&args, env, variables),
    }
}

fn text(arg: OsString) -> Result<String, ConfigError> {
    arg.into_string()
        .map_err(|arg| ConfigError::new(format!("argument {arg:?} is not UTF-8 text")))
}

/// The command of HyperShift's sidecars, by their own names or as subcommands of its operator: whatever else that is asked for,
/// the operator itself does, which stands beside this program.
fn sidecar(
    program: &Path,
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
) -> Option<Result<Parsed, ConfigError>> {
    let name = program.file_name()?.to_str()?;
    if let Some(sidecar) = Sidecar::of_name(name) {
        return Some(hypershift::sidecar(sidecar, args, env));
    }
    if name != OPERATOR {
        return None;
    }
    let asked = args.split_first();
    let asked = asked.and_then(|(first, args)| Some((Sidecar::of_name(first)?, args)));
    Some(match asked {
        Some((sidecar, args)) => hypershift::sidecar(sidecar, args, env),
        None => Ok(Parsed {
            command: Command::Execute {
                program: program.with_file_name(format!("{OPERATOR}{ORIGINAL}")),
                args: args.to_vec(),
            },
            warnings: Vec::new(),
        }),
    })
}

/// Whether upstream's flags follow; removes all other arguments from `args`.
fn compat_mode(program: &OsString, args: &mut Vec<String>) -> Option<Program> {
    match Path::new(program)
        .file_name()
        .and_then(|name| name.to_str())
    {
        Some("proxy-server" | "konnectivity-server") => return Some(Program::Server),
        Some("proxy-agent" | "konnectivity-agent") => return Some(Program::Agent),
        _ => (),
    }
    let mode = match args.first().map(String::as_str) {
        Some("server") => Program::Server,
        Some("agent") => Program::Agent,
        _ => return None,
    };
    // Behind `--` it would be a positional argument.
    let flag = args
        .iter()
        .take_while(|arg| *arg != "--")
        .position(|arg| arg == "--compat")?;
    args.remove(flag);
    args.remove(0);
    Some(mode)
}
