//! Tests of flags from a file and from the environment.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Arg, ArgAction, CommandFactory as _};

use super::super::Cli;
use super::super::given::{RESTRICTIONS, must_have_value};
use super::{file, run, says};
use crate::plan::ServerPlan;
use crate::{CheckGiven, Command, ConfigError, parse, parse_naming};

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
    assert_eq!(plan.clients.frontends.len(), 2);
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
    assert_eq!(plan.clients.frontends.len(), 3);
    let one = server(FILE, &variables, &["--frontend=grpc=unix:/d.sock"]).unwrap();
    assert_eq!(one.clients.frontends.len(), 1);
}

/// For a flag, its value in a file and in a variable; both empty.
const EMPTY: &[(&str, &str)] = &[("[]", ""), ("\"\"", " \n"), ("\" \"", "")];

const SERVER: &str = r#"
frontend = "grpc=unix:/run/adit/kas.sock"
cluster-cert = "PEM"
cluster-key = "PEM"
cluster-ca-cert = "PEM"
"#;
const AGENT: &str = r#"
proxy-server-host = "a"
ca-cert = "PEM"
"#;

/// Empty is not absent: taken for the default, an empty list or permission would permit everything.
#[test]
fn an_empty_list_or_restriction_is_an_error_from_file_environment_and_command_line() {
    let (dir, pem) = file();
    let path = dir.path().join("adit.toml");
    let path = path.to_str().unwrap();
    let mut checked = Vec::new();
    let cli = Cli::command();
    for program in ["server", "agent"] {
        let command = cli.find_subcommand(program).unwrap();
        for arg in command.get_arguments().filter(|arg| must_have_value(arg)) {
            let flag = arg.get_long().unwrap();
            let variable = format!("ADIT_{}", flag.replace('-', "_").to_uppercase());
            let base = if program == "server" { SERVER } else { AGENT };
            let base = base.replace("PEM", &pem);
            let lines = base
                .lines()
                .filter(|line| !line.starts_with(&format!("{flag} ")));
            let base = lines.collect::<Vec<_>>().join("\n");
            let run = |text: &str, env: &dyn Fn(&str) -> Option<String>, more: &[&str]| {
                std::fs::write(path, format!("{base}\n{text}")).unwrap();
                let argv = ["adit", program, "--config", path];
                let argv = argv.iter().chain(more).map(OsString::from);
                parse(argv, env).unwrap_err().message().to_owned()
            };
            let unset = |_name: &str| None;
            for (in_file, in_variable) in EMPTY {
                if arg.get_action().takes_values() && (*in_file != "[]" || is_list(arg)) {
                    let text = run(&format!("{flag} = {in_file}\n"), &unset, &[]);
                    let expected = format!("{path}: {flag}: it is empty; write a value");
                    assert!(text.contains(&expected), "{flag}: {text}");
                }
                let env = |name: &str| (name == variable).then(|| (*in_variable).to_owned());
                let text = run("", &env, &[]);
                let expected = format!("{variable}: it is empty; write a value");
                assert!(text.starts_with(&expected), "{flag}: {text}");
            }
            let given = format!("--{flag}=");
            // Without a cgroup this one is not looked at.
            let with = (flag == "redirect-apiserver").then_some("--redirect-cgroup=/c");
            let more: Vec<&str> = [given.as_str()].into_iter().chain(with).collect();
            let text = run("", &unset, &more);
            let of_it = ["empty", "none was supplied", "\"\"", "''", flag];
            assert!(
                of_it.iter().any(|words| text.contains(words)),
                "{given}: {text}"
            );
            checked.push(flag);
        }
    }
    let permissions = [
        "allow-target",
        "client-allow-target",
        "agent-grant",
        "allowed-destination",
    ];
    let all = permissions.iter().chain(RESTRICTIONS);
    let missed: Vec<_> = all.filter(|flag| !checked.contains(flag)).collect();
    assert!(missed.is_empty(), "{missed:?}");
}

fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

#[test]
fn all_and_none_are_words_for_permissions() {
    let words = |flag: &str, word: &str| {
        let base = "cluster-ca-cert = \"PEM\"\ninsecure-allow-unauthenticated-agents = false";
        let insecure = "insecure-allow-unauthenticated-agents = true";
        let text = FILE.replace(insecure, base);
        server(&format!("{text}\n{flag} = [{word}]"), &[], &[])
    };
    let asked = |word: &str| {
        let rules = words("client-allow-target", word)
            .unwrap()
            .clients
            .rules
            .clone();
        rules
            .of_client(None)
            .map(|targets| targets.check("tcp", "10.0.0.1:443").is_ok())
    };
    assert_eq!(asked("\"all\""), None);
    assert_eq!(asked("\"none\""), Some(false));
    assert_eq!(asked("\"none.\", \"*\""), Some(true));
    let open = |word: &str| words("agent-grant", word).unwrap().agents.grants.is_open();
    assert_eq!(["\"all\"", "\"none\""].map(open), [true, false]);
    let allowed = words("allowed-destination", "\"none\"").unwrap();
    assert!(allowed.destinations.allowed.is_empty());
    for (flag, word, part) in [
        ("client-allow-target", "\"none\", \"*\"", "stands alone"),
        ("agent-grant", "\"cn=a,id=a\", \"all\"", "stands alone"),
        ("allowed-destination", "\"all\"", "needs a port"),
    ] {
        let error = words(flag, word).unwrap_err();
        says(&error, part);
    }
}

#[test]
fn variables_without_effect_are_named() {
    let (_dir, pem) = file();
    let names = [
        "HOME",
        "ADIT_LOG",
        "ADIT_LOG_LEVEL",
        "ADIT_ALOW_TARGET",
        "ADIT_COLOUR",
        // Services called adit-server and adit-agent.
        "ADIT_SERVER_SERVICE_HOST",
        "ADIT_SERVER_SERVICE_PORT",
        "ADIT_SERVER_SERVICE_PORT_AGENTS",
        "ADIT_SERVER_PORT",
        "ADIT_SERVER_PORT_8132_TCP",
        "ADIT_SERVER_PORT_8132_TCP_ADDR",
        "ADIT_SERVER_PORT_8132_TCP_PORT",
        "ADIT_SERVER_PORT_53_UDP_PROTO",
        "ADIT_AGENT_PORT",
    ]
    .map(str::to_owned);
    let env = |name: &str| match name {
        "ADIT_LOG_LEVEL" => Some("debug".to_owned()),
        "ADIT_SERVER_PORT" | "ADIT_AGENT_PORT" => Some("tcp://10.0.0.1:8132".to_owned()),
        _ => names
            .iter()
            .any(|known| known == name)
            .then(|| "s3cret".to_owned()),
    };
    let ca = format!("--ca-cert={pem}");
    let native = ["adit", "agent", &ca, "--proxy-server-host=a"];
    let warnings = |argv: &[&str]| {
        let argv = argv.iter().map(OsString::from);
        parse_naming(argv, &env, &names).unwrap().warnings
    };
    assert_eq!(
        warnings(&native),
        [
            "ADIT_ALOW_TARGET has no effect: adit agent has no such flag; did you mean ADIT_ALLOW_TARGET?",
            "ADIT_COLOUR has no effect: adit agent has no such flag",
        ]
    );
    let compat = ["proxy-agent", &ca, "--proxy-server-host=a"];
    assert_eq!(
        warnings(&compat),
        [
            "ADIT_LOG_LEVEL has no effect in compat mode",
            "ADIT_ALOW_TARGET has no effect: adit agent has no such flag; did you mean ADIT_ALLOW_TARGET?",
            "ADIT_COLOUR has no effect: adit agent has no such flag",
        ]
    );
    let checked = ["adit", "check", "agent", &ca, "--proxy-server-host=a"];
    let argv = checked.iter().map(OsString::from);
    let Command::Check(check) = parse_naming(argv, &env, &names).unwrap().command else {
        panic!("check")
    };
    assert!(matches!(check.given, CheckGiven::Agent(_, warnings) if warnings.len() == 2));
    let many: Vec<String> = (0..20).map(|n| format!("ADIT_X{n}")).collect();
    let argv = native.iter().map(OsString::from);
    let warnings = parse_naming(argv, &|_name| None, &many).unwrap().warnings;
    assert_eq!(warnings.len(), 17);
    assert_eq!(warnings[16], "4 further ADIT_ variables have no effect");
}

/// `false` and `0` are values; empty variables and Kubernetes Service variables are ignored.
#[test]
fn false_turns_a_switch_off_and_kubernetes_service_variables_are_ignored() {
    let insecure = "ADIT_INSECURE_ALLOW_UNAUTHENTICATED_AGENTS";
    for off in ["false", "0"] {
        let error = server(FILE, &[(insecure, off)], &[]).unwrap_err();
        says(&error, "--cluster-ca-cert");
    }
    let variables = [
        (insecure, ""),
        ("ADIT_AGENT_PORT", "tcp://10.0.0.1:8091"),
        ("ADIT_HEALTH_PORT", "udp://10.0.0.1:1"),
        ("ADIT_ADMIN_BIND_ADDRESS", ""),
        ("ADIT_DELETE_EXISTING_UDS_FILE", "0"),
    ];
    let plan = server(FILE, &variables, &[]).unwrap();
    assert_eq!(plan.agents.port.as_ref().unwrap().bind.port, 8091);
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
    says(&twice, "by another name");
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
            says(&error, part);
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

/// A process list shows command lines. The environment and the file are for the process alone.
#[test]
fn a_url_with_a_password_is_refused_on_the_command_line_alone() {
    let (_dir, pem) = file();
    let agent = |more: &[&str], variable: Option<&str>| {
        let own = ["adit", "agent", "--proxy-server-host=a", "--ca-cert", &pem];
        let argv = own.iter().chain(more).map(OsString::from);
        let env = |name: &str| {
            let value = variable.filter(|_| name == "ADIT_TARGET_PROXY");
            value.map(str::to_owned)
        };
        parse(argv, &env).map(|parsed| match parsed.command {
            Command::Agent(plan) => plan.target_proxy.clone(),
            other => panic!("{other:?}"),
        })
    };
    let secret = "http://us:s3cret@proxy:3128";
    for more in [
        &["--target-proxy", secret][..],
        &["--target-proxy=http://us:s3cret@proxy:3128"],
    ] {
        let error = agent(more, None).unwrap_err().message().to_owned();
        assert!(
            error.contains("ADIT_TARGET_PROXY") && !error.contains("s3cret"),
            "{error}"
        );
    }
    let proxy = agent(&[], Some(secret)).unwrap().unwrap();
    assert_eq!(proxy.user, Some(("us".to_owned(), "s3cret".to_owned())));
    let clear = agent(&["--target-proxy", "http://proxy"], None).unwrap();
    assert_eq!(clear.map(|proxy| proxy.port), Some(80));
    let error = agent(&[], Some("socks5://us:s3cret@proxy")).unwrap_err();
    let error = error.message();
    assert!(
        error.contains("--target-proxy has no usable scheme") && !error.contains("s3cret"),
        "{error}"
    );
}
