//! Upstream's command lines, parsed through the public API.

mod agent;
mod grammar;
mod hypershift;
mod server;
mod server_check;
mod settings;

use std::ffi::OsString;

use tempfile::TempDir;

use super::pflag::Flag;
use super::shared::SharedOptions;
use crate::flags::tests::{says, words};
use crate::plan::{AgentPlan, ServerPlan};
use crate::{Command, ConfigError, Parsed, parse};

/// An environment without variables.
pub(super) fn no_env(_name: &str) -> Option<String> {
    None
}

pub(super) fn run(program: &str, args: &[&str]) -> Result<Parsed, ConfigError> {
    let argv = [&[program][..], args].concat();
    parse(argv.into_iter().map(OsString::from), &no_env)
}

/// `name=default` of each flag whose default is not the zero of its type, sorted.
fn defaults(flags: &[Flag<'_>]) -> Vec<String> {
    let mut defaults: Vec<String> = flags
        .iter()
        .filter_map(|flag| Some(format!("{}={}", flag.name, flag.shown_default()?)))
        .collect();
    defaults.sort();
    defaults
}

/// The same, without the flags that both programs share.
fn defaults_beside_shared(flags: &[Flag<'_>]) -> Vec<String> {
    let shared = defaults(&SharedOptions::default().flags());
    let mut defaults = defaults(flags);
    defaults.retain(|flag| !shared.contains(flag));
    defaults
}

/// A directory with existing files, to name in flags.
pub(super) struct Files {
    dir: TempDir,
}

impl Files {
    pub(super) fn new() -> Self {
        let dir = TempDir::new().unwrap();
        for name in ["cert", "key", "ca", "token"] {
            std::fs::write(dir.path().join(name), "content is not looked at").unwrap();
        }
        Self { dir }
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// `--flag=path` of the file `name`.
    pub(super) fn flag(&self, flag: &str, name: &str) -> String {
        format!("--{flag}={}", self.path(name))
    }

    /// Required flags of a server on a Unix socket.
    pub(super) fn server(&self) -> Vec<String> {
        vec![
            "--uds-name=/run/x.sock".to_owned(),
            "--server-port=0".to_owned(),
            self.flag("cluster-cert", "cert"),
            self.flag("cluster-key", "key"),
            self.flag("cluster-ca-cert", "ca"),
        ]
    }

    /// Required flags of a server on TCP.
    pub(super) fn tcp_server(&self) -> Vec<String> {
        let mut args = self.server().split_off(2);
        args.extend([
            self.flag("server-cert", "cert"),
            self.flag("server-key", "key"),
            self.flag("server-ca-cert", "ca"),
        ]);
        args
    }
}

fn with(base: Vec<String>, more: &[&str]) -> Vec<String> {
    base.into_iter()
        .chain(more.iter().map(|&arg| arg.to_owned()))
        .collect()
}

/// The parsed `proxy-server` with `more` after `base`.
pub(super) fn server(
    base: Vec<String>,
    more: &[&str],
) -> Result<(ServerPlan, Vec<String>), ConfigError> {
    let args = with(base, more);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    run("proxy-server", &args).map(|parsed| match parsed.command {
        Command::Server(plan) => (*plan, parsed.warnings),
        other => panic!("not a server: {other:?}"),
    })
}

/// The parsed `proxy-agent` with `--ca-cert` and `more`.
pub(super) fn agent(files: &Files, more: &[&str]) -> Result<(AgentPlan, Vec<String>), ConfigError> {
    let args = with(vec![files.flag("ca-cert", "ca")], more);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    run("proxy-agent", &args).map(|parsed| match parsed.command {
        Command::Agent(plan) => (*plan, parsed.warnings),
        other => panic!("not an agent: {other:?}"),
    })
}
