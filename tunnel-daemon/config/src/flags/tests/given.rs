//! Tests of flags from a file and from the environment.

use std::ffi::OsString;
use std::time::Duration;

use super::{file, run};
use crate::plan::ServerPlan;
use crate::{Command, ConfigError, parse};

/// A server from a config file with this text (`PEM` stands for an existing file), from variables, and from further
/// flags.
fn server(
    text: &str,
    variables: &[(&str, &str)],
    more: &[&str],
) -> Result<ServerPlan, ConfigError> {
    let (dir, pem) = file();
    let path = dir.path().join("adit.toml");
    std::fs::write(&path, text.replace("PEM", &pem)).unwrap();
    let argv = ["adit", "server", "--config", path.to_str().unwrap()];
    let argv = argv.iter().chain(more).map(OsString::from);
    let env = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    parse(argv, &env).map(|parsed| match parsed.command {
        Command::Server(plan) => *plan,
        other => panic!("not a server: {other:?}"),
    })
}

const FILE: &str = r#"
frontend = ["grpc=unix:/run/adit/kas.sock", "http-connect=unix:/run/adit/connect.sock"]
cluster-cert = "PEM"
cluster-key = "PEM"
insecure-allow-unauthenticated-agents = true
destination-proxy-header = false
dial-timeout = "7s"
pending-dials = 5000
"#;

#[test]
fn flags_come_from_a_file() {
    let plan = server(FILE, &[], &[]).unwrap();
    assert_eq!(plan.frontends.len(), 2);
    assert_eq!(plan.dial.timeout, Some(Duration::from_secs(7)));
    assert_eq!(plan.dial.pending_max.get(), 5000);
}

#[test]
fn the_environment_wins_over_the_file_and_the_command_line_over_both() {
    let variables = [
        ("ADIT_DIAL_TIMEOUT", "8s"),
        ("ADIT_PENDING_DIALS", "6000"),
        (
            "ADIT_FRONTEND",
            "grpc=unix:/a.sock\ngrpc=unix:/b.sock\ngrpc=unix:/c.sock\n",
        ),
        ("ADIT_INSECURE_ALLOW_UNAUTHENTICATED_AGENTS", "true"),
    ];
    let plan = server(FILE, &variables, &["--pending-dials", "9000"]).unwrap();
    assert_eq!(plan.dial.timeout, Some(Duration::from_secs(8)));
    assert_eq!(plan.dial.pending_max.get(), 9000);
    assert_eq!(plan.frontends.len(), 3);
    let one = server(FILE, &variables, &["--frontend=grpc=unix:/d.sock"]).unwrap();
    assert_eq!(one.frontends.len(), 1);
}

/// `false` and `0` are values; empty variables and Kubernetes Service variables are ignored.
#[test]
fn false_turns_a_switch_off_and_kubernetes_service_variables_are_ignored() {
    let insecure = "ADIT_INSECURE_ALLOW_UNAUTHENTICATED_AGENTS";
    for off in ["false", "0"] {
        let error = server(FILE, &[(insecure, off)], &[]).unwrap_err();
        assert!(
            error.message().contains("--cluster-ca-cert"),
            "{}",
            error.message()
        );
    }
    let variables = [
        (insecure, ""),
        ("ADIT_AGENT_PORT", "tcp://10.0.0.1:8091"),
        ("ADIT_HEALTH_PORT", "udp://10.0.0.1:1"),
        ("ADIT_ADMIN_BIND_ADDRESS", ""),
        ("ADIT_DELETE_EXISTING_UDS_FILE", "0"),
    ];
    let plan = server(FILE, &variables, &[]).unwrap();
    assert_eq!(plan.agents.bind.port, 8091);
    let error = server(FILE, &[("ADIT_AGENT_PORT", "1:2")], &[]).unwrap_err();
    assert!(
        error.message().starts_with("ADIT_AGENT_PORT: "),
        "{}",
        error.message()
    );
}

#[test]
fn flag_aliases_work_in_file_and_environment() {
    let (_dir, pem) = file();
    let path = format!("{pem}.toml");
    let run = |text: &str, variable: &str| {
        std::fs::write(&path, text.replace("PEM", &pem)).unwrap();
        let argv = ["adit", "agent", "--config", &path].map(OsString::from);
        let value = pem.clone();
        parse(argv, &move |name| (name == variable).then(|| value.clone()))
    };
    let base = "proxy-server-host = \"a\"\nca-cert = \"PEM\"\n";
    let token = "service-account-token-path = \"PEM\"\n";
    run(&format!("{base}{token}"), "").unwrap();
    run(base, "ADIT_SERVICE_ACCOUNT_TOKEN_PATH").unwrap();
    let twice = run(&format!("{base}{token}token-path = \"PEM\"\n"), "").unwrap_err();
    assert!(
        twice.message().contains("by another name"),
        "{}",
        twice.message()
    );
}

#[test]
fn help_does_not_need_the_config_file() {
    for args in [
        &["server", "--config=/not/there.toml", "--help"][..],
        &["agent", "--config", "/not/there.toml", "-h"],
    ] {
        let parsed = run(args).unwrap();
        assert!(matches!(parsed.command, Command::Print(text) if text.contains("--config")));
    }
    let error = run(&["server", "--config", "--log-level=debug"]).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{}", error.message());
}

#[test]
fn errors_name_the_file_or_variable() {
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        ("frontends = 1", "", ["adit.toml: ", "adit server has no flag --frontends"]),
        ("config = \"x\"", "", ["adit.toml: ", "names no other file"]),
        ("frontend = 1\nfrontend = 2", "", ["adit.toml: line 2: ", "duplicate key"]),
        ("dial-timeout = \"soon\"", "", ["adit.toml: dial-timeout: ", "'soon'"]),
        ("pending-dials = 1.5", "", ["adit.toml: pending-dials: ", "write a text"]),
        ("pending-dials = [1]", "", ["adit.toml: pending-dials: ", "write a text"]),
        ("enable-lease-controller = 1", "", ["enable-lease-controller: ", "true or false"]),
        ("", "maybe", ["ADIT_ENABLE_LEASE_CONTROLLER: ", "true or false"]),
    ];
    for (text, variable, expected) in cases {
        let variables = [("ADIT_ENABLE_LEASE_CONTROLLER", variable)];
        let error = server(text, &variables, &[]).unwrap_err();
        for part in expected {
            assert!(error.message().contains(part), "{}", error.message());
        }
        assert_eq!((error.exit_code(), error.is_json()), (1, false));
    }
    // The tip names a flag that the file sets, but the error is not attributed to the file.
    let typed = server(FILE, &[], &["--dial-timeou=1s"]).unwrap_err();
    let told = typed.message();
    assert!(
        told.contains("similar argument exists: '--dial-timeout'"),
        "{told}"
    );
    assert!(
        !told.contains("adit.toml") && typed.exit_code() == 2,
        "{told}"
    );
    let error = server("log-format = \"json\"", &[], &[]).unwrap_err();
    assert!(error.is_json(), "{}", error.message());
    let error = run(&["agent", "--config=/not/there.toml"]).unwrap_err();
    assert!(
        error.message().starts_with("--config /not/there.toml: "),
        "{}",
        error.message()
    );
}
