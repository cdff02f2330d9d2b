//! Command lines of a server and its agents, and their plans.

use std::ffi::OsString;

use crate::certificates::ThrowawayFiles;
use adit_config::plan::{AgentPlan, ProxyPlan, ServerPlan};
use adit_config::{Command, parse};

/// A server whose agent port is at this address. Frontends are left to the caller.
pub fn server(files: &ThrowawayFiles, agents: &str, port: &str) -> Vec<String> {
    vec![
        "adit".to_owned(),
        "server".to_owned(),
        format!("--cluster-cert={}", files.cert("server").display()),
        format!("--cluster-key={}", files.key("server").display()),
        format!("--cluster-ca-cert={}", files.ca_file().display()),
        format!("--agent-bind-address={agents}"),
        format!("--agent-port={port}"),
        "--health-bind-address=127.0.0.1".to_owned(),
        "--health-port=0".to_owned(),
        "--admin-port=off".to_owned(),
    ]
}

/// An agent of the server at this address, with a health port.
pub fn agent(files: &ThrowawayFiles, server: &str, id: &str) -> Vec<String> {
    vec![
        "adit".to_owned(),
        "agent".to_owned(),
        format!("--proxy-server-host={server}"),
        format!("--ca-cert={}", files.ca_file().display()),
        format!("--agent-cert={}", files.cert("agent").display()),
        format!("--agent-key={}", files.key("agent").display()),
        format!("--agent-id={id}"),
        "--sync-interval=50ms".to_owned(),
        "--health-server-host=127.0.0.1".to_owned(),
        "--health-server-port=0".to_owned(),
        "--admin-server-port=off".to_owned(),
    ]
}

/// A proxy of the servers at these addresses, with a health port. Frontends are left to the caller.
pub fn proxy(files: &ThrowawayFiles, servers: &str) -> Vec<String> {
    vec![
        "adit".to_owned(),
        "proxy".to_owned(),
        format!("--proxy-server-host={servers}"),
        format!("--ca-cert={}", files.ca_file().display()),
        format!("--client-cert={}", files.cert("client").display()),
        format!("--client-key={}", files.key("client").display()),
        "--health-bind-address=127.0.0.1".to_owned(),
        "--health-port=0".to_owned(),
        "--admin-socket=off".to_owned(),
    ]
}

/// Parses a command line with these environment variables. The error is the message for the user.
fn command_in(env: &[(&str, String)], args: &[String]) -> Result<Command, String> {
    let value = |name: &str| {
        let mut found = env.iter().filter(|(known, _)| *known == name);
        found.next().map(|(_, value)| value.clone())
    };
    match parse(args.iter().map(OsString::from), &value) {
        Ok(parsed) => Ok(parsed.command),
        Err(error) => Err(error.message().to_owned()),
    }
}

/// Parses a server's command line.
///
/// # Errors
/// The message for the user.
pub fn server_plan(args: &[String]) -> Result<ServerPlan, String> {
    match command_in(&[], args)? {
        Command::Server(plan) => Ok(*plan),
        other => Err(format!("{other:?} is no server")),
    }
}

/// Parses a proxy's command line.
///
/// # Errors
/// The message for the user.
pub fn proxy_plan(args: &[String]) -> Result<ProxyPlan, String> {
    match command_in(&[], args)? {
        Command::Proxy(plan) => Ok(*plan),
        other => Err(format!("{other:?} is no proxy")),
    }
}

/// Parses an agent's command line.
///
/// # Errors
/// The message for the user.
pub fn agent_plan(args: &[String]) -> Result<AgentPlan, String> {
    agent_plan_in(&[], args)
}

/// As [`agent_plan`], with these environment variables.
///
/// # Errors
/// The message for the user.
pub fn agent_plan_in(env: &[(&str, String)], args: &[String]) -> Result<AgentPlan, String> {
    match command_in(env, args)? {
        Command::Agent(plan) => Ok(*plan),
        other => Err(format!("{other:?} is no agent")),
    }
}
